"""A real Slurm on this machine: several nodes, each a slurmd on a port of its own. Needs root and Debian's packages."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import leaks

_CPUS = 2
_PATIENCE = 20.0  # seconds for all nodes to be idle, and for daemons to end


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


class Slurm:
    """Controller, authentication and `num_nodes` nodes, up from entering to leaving.

    Args:
        folder: for all its files; made here, removed at the end.
    """

    def __init__(self, folder: Path, num_nodes: int) -> None:
        self._folder, self._num_nodes = folder, num_nodes
        self.variables = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def run(self, *command: str, timeout: float = 50, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a command (srun, sbatch, ...) with this Slurm."""
        environment = {**self.variables, **variables}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=False)

    def __enter__(self) -> Self:
        try:
            self._start_authentication()
            self._write_configuration()
            subprocess.run(["slurmctld", "-c"], env=self.variables, check=True)
            for node in self._nodes:
                subprocess.run(["slurmd", "-N", node], env=self.variables, check=True)
            self._await_nodes()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    @property
    def _nodes(self) -> list[str]:
        return [f"n{number}" for number in range(1, self._num_nodes + 1)]

    def _start_authentication(self) -> None:
        self._folder.mkdir(mode=0o755)
        for name in ("state", "log", "munge", *(f"spool/{node}" for node in self._nodes)):
            (self._folder / name).mkdir(parents=True)
        munge = self._folder / "munge"
        (munge / "key").write_bytes(secrets.token_bytes(1024))
        (munge / "key").chmod(0o600)
        subprocess.run(["chown", "-R", "munge:", str(munge)], check=True)
        as_munge = ["setpriv", "--reuid", "munge", "--regid", "munge", "--init-groups"]
        files = [f"--{name}={munge / name.removesuffix('-file')}" for name in ("key-file", "socket", "pid-file")]
        files += [f"--log-file={munge / 'log'}", f"--seed-file={munge / 'seed'}"]
        subprocess.run([*as_munge, "munged", *files], check=True)

    def _write_configuration(self) -> None:
        host = socket.gethostname().split(".")[0]
        controller, *ports = free_ports(1 + self._num_nodes)
        lines = [
            "ClusterName=lab",
            f"SlurmctldHost={host}(127.0.0.1)",
            f"SlurmctldPort={controller}",
            "SlurmUser=root",
            "SlurmdUser=root",
            "AuthType=auth/munge",
            f"AuthInfo=socket={self._folder}/munge/socket",
            "CryptoType=crypto/munge",
            f"StateSaveLocation={self._folder}/state",
            f"SlurmdSpoolDir={self._folder}/spool/%n",
            f"SlurmctldPidFile={self._folder}/slurmctld.pid",
            f"SlurmdPidFile={self._folder}/slurmd.%n.pid",
            f"SlurmctldLogFile={self._folder}/log/slurmctld.log",
            f"SlurmdLogFile={self._folder}/log/slurmd.%n.log",
            "ProctrackType=proctrack/linuxproc",
            "TaskPlugin=task/none",
            "SwitchType=switch/none",
            "MpiDefault=none",
            "JobAcctGatherType=jobacct_gather/none",
            "AccountingStorageType=accounting_storage/none",
            "JobCompType=jobcomp/none",
            "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_Core",
            "SchedulerParameters=sched_interval=1,bf_interval=1",
            "SlurmdParameters=config_overrides",
            "ReturnToService=2",
            "KillWait=3",
            "MailProg=/bin/true",
            *(
                f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={_CPUS} State=UNKNOWN"
                for node, port in zip(self._nodes, ports, strict=True)
            ),
            f"PartitionName=lab Nodes={','.join(self._nodes)} Default=YES State=UP OverSubscribe=FORCE:4",
        ]
        (self._folder / "slurm.conf").write_text("\n".join(lines) + "\n")

    def _await_nodes(self) -> None:
        deadline = time.monotonic() + _PATIENCE
        while self.run("sinfo", "-h", "-t", "idle", "-o", "%D").stdout.strip() != str(self._num_nodes):
            if time.monotonic() > deadline:
                raise TimeoutError(f"not all nodes are idle: {self.run('sinfo', '-N').stdout}")
            time.sleep(0.1)

    def _stop(self) -> None:
        files = [*self._folder.glob("slurmd.*.pid"), self._folder / "slurmctld.pid", self._folder / "munge" / "pid"]
        pids = [int(each.read_text()) for each in files if each.exists()]
        for pid in pids:
            _signal(pid, signal.SIGTERM)
        deadline = time.monotonic() + _PATIENCE
        while any(leaks.is_running(pid) for pid in pids) and time.monotonic() < deadline:
            time.sleep(0.05)
        for pid in pids:
            _signal(pid, signal.SIGKILL)
        shutil.rmtree(self._folder, ignore_errors=True)


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
