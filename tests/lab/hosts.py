"""Hosts on one machine: network namespaces on a bridge, each with a name and an address of its own. Needs root."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Self

_NETWORK = "10.77.0"


def run(*command: str) -> None:
    """Run a command that must succeed."""
    subprocess.run(command, check=True, capture_output=True, text=True)


class Hosts:
    """`count` hosts, up from entering to leaving. They reach one another and nothing else."""

    def __init__(self, count: int) -> None:
        self._prefix = f"rk{os.getpid() % 10000}"
        self.names = [f"{self._prefix}h{number}" for number in range(1, count + 1)]
        self._switch = f"{self._prefix}sw"
        self._started: list[subprocess.Popen[str]] = []

    def address(self, host: int) -> str:
        """The address of a host, counted from 0."""
        return f"{_NETWORK}.{host + 1}"

    def start(self, host: int, *command: str, **variables: str) -> subprocess.Popen[str]:
        """Start a command on a host, under the host's own name."""
        name = self.names[host]
        under_own_name = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', name]
        process = subprocess.Popen(
            ["ip", "netns", "exec", name, *under_own_name, *command],
            env={**os.environ, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._started.append(process)
        return process

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

    def _tear_down(self) -> None:
        for process in self._started:
            process.kill()
            process.communicate()
        for name in (*self.names, self._switch):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
            folder = Path("/etc/netns") / name
            (folder / "hosts").unlink(missing_ok=True)
            if folder.is_dir():
                folder.rmdir()
