"""Hosts on one machine: network namespaces on a bridge, each with a name and an address of its own. Needs root."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
from pathlib import Path
from types import TracebackType
from typing import IO, Self

_NETWORK = "10.77.0"
_PATIENCE = 10.0  # seconds for what was ended to end
_NUMBERS = itertools.count()  # so that one process can have several networks
_SHARED_MEMORY = Path("/dev/shm")
# What a host has of its own besides its network: a name, and shared memory, which doesn't reach other hosts.
_BECOME_HOST = f'hostname "$0" && mount --bind "{_SHARED_MEMORY}/$0" {_SHARED_MEMORY} && exec "$@"'

# The bucket holds two of the largest segments there are: with one, a cable of 1 Gbit/s carried half of that at times.
_SHAPE = ("burst", "128kb", "latency", "20ms")


def run(*command: str) -> None:
    """Run a command that must succeed."""
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


class Hosts:
    """`count` hosts, up from entering to leaving. They reach one another and nothing else.

    Each has a cable to a switch, which is as quick as the machine unless it is shaped. Hosts are counted from 0.
    """

    def __init__(self, count: int) -> None:
        self._prefix = f"rk{os.getpid() % 10000}n{next(_NUMBERS)}"
        self.names = [f"{self._prefix}h{number}" for number in range(1, count + 1)]
        self._switch = f"{self._prefix}sw"
        self._started: list[subprocess.Popen[str]] = []

    def address(self, host: int) -> str:
        """The address of a host."""
        return f"{_NETWORK}.{host + 1}"

    def start(
        self, host: int, *command: str, output: int | IO[str] = subprocess.PIPE, **variables: str
    ) -> subprocess.Popen[str]:
        """Start a command on a host, under the host's own name; `output` is for both standard output and error."""
        name = self.names[host]
        process = subprocess.Popen(
            ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", _BECOME_HOST, name, *command],
            env={**os.environ, **variables},
            stdout=output,
            stderr=output,
            text=True,
            start_new_session=True,
        )
        self._started.append(process)
        return process

    # -- cables ---------------------------------------------------------------------------------------------------

    def shape(self, host: int, rate: str) -> None:
        """Let a host's cable carry `rate` ("200mbit") at most, in each direction."""
        for name, end in self._ends(host):
            run("tc", "-n", name, "qdisc", "replace", "dev", end, "root", "tbf", "rate", rate, *_SHAPE)

    def lose(self, host: int, share: float) -> None:
        """Let a host's cable lose a random share of what is sent to it."""
        rule = ("INPUT", "-i", "eth0", "-m", "statistic", "--mode", "random", "--probability", str(share), "-j", "DROP")
        run("ip", "netns", "exec", self.names[host], "iptables", "-A", *rule)

    def bytes_sent(self, host: int) -> int:
        """What a host has sent so far, headers and all."""
        count = "/sys/class/net/eth0/statistics/tx_bytes"
        command = ["ip", "netns", "exec", self.names[host], "cat", count]
        return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    def cut(self, host: int) -> None:
        """Let nothing through a host's cable; what is on its way is lost."""
        name, end = self._ends(host)[1]
        run("ip", "-n", name, "link", "set", end, "down")

    def heal(self, host: int) -> None:
        """Undo `cut`."""
        name, end = self._ends(host)[1]
        run("ip", "-n", name, "link", "set", end, "up")

    def _ends(self, host: int) -> tuple[tuple[str, str], tuple[str, str]]:
        """Of a host's cable, the namespace and the name of its end at the host and of that at the switch."""
        return (self.names[host], "eth0"), (self._switch, f"p{host}")

    # -- life -----------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        try:
            self._build()
        except BaseException:
            self._tear_down()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tear_down()

    def _build(self) -> None:
        run("ip", "netns", "add", self._switch)
        run("ip", "-n", self._switch, "link", "add", "br0", "type", "bridge")
        run("ip", "-n", self._switch, "link", "set", "br0", "up")
        for host, name in enumerate(self.names):
            run("ip", "netns", "add", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
            cable = ("type", "veth", "peer", "name", f"p{host}", "netns", self._switch)
            run("ip", "link", "add", "eth0", "netns", name, *cable)
            run("ip", "-n", self._switch, "link", "set", f"p{host}", "master", "br0", "up")
            run("ip", "-n", name, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
            run("ip", "-n", name, "link", "set", "eth0", "up")
            names = "".join(f"{self.address(other)} {each}\n" for other, each in enumerate(self.names))
            folder = Path("/etc/netns") / name
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
            (_SHARED_MEMORY / name).mkdir()

    def _tear_down(self) -> None:
        for process in self._started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and what it has started, which would keep its output open
        for process in self._started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=_PATIENCE)
        for name in (*self.names, self._switch):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
            folder = Path("/etc/netns") / name
            (folder / "hosts").unlink(missing_ok=True)
            if folder.is_dir():
                folder.rmdir()
            shutil.rmtree(_SHARED_MEMORY / name, ignore_errors=True)
