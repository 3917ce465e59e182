"""The watch over what tests leave behind sees each kind of it: these are its red twins."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import leaks
from needs import linux
from renkei.launch.local import job_folder


@contextmanager
def process() -> Iterator[None]:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        yield
    finally:
        child.communicate()


@contextmanager
def orphan() -> Iterator[None]:
    """A process whose parent has ended."""
    code = "import subprocess, sys; p = subprocess.Popen(['sleep', '60'], stdout=subprocess.DEVNULL); print(p.pid)"
    pid = int(subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True).stdout)
    try:
        yield
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)


@contextmanager
def thread() -> Iterator[None]:
    end = threading.Event()
    other = threading.Thread(target=end.wait)
    other.start()
    try:
        yield
    finally:
        end.set()
        other.join()


@contextmanager
def variable() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RENKEI_LEFT_BEHIND", "1")
        yield


@contextmanager
def variable_gone() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PATH")
        yield


@contextmanager
def port() -> Iterator[None]:
    with socket.create_server(("127.0.0.1", 0)):
        yield


@contextmanager
def shared_memory() -> Iterator[None]:
    path = Path(f"/dev/shm/renkei-left-behind-{os.getpid()}")
    path.touch()
    try:
        yield
    finally:
        path.unlink()


@contextmanager
def folder() -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="renkei-"):
        yield


LEFT = {"process": process, "orphan": orphan, "thread": thread, "environment variable": variable,
        "environment variable gone": variable_gone, "listening port": port, "name in /dev/shm": shared_memory,
        "temporary folder": folder}  # fmt: skip


@linux
@pytest.mark.parametrize("kind", LEFT)
def test_red_twin_something_is_left_behind(kind: str) -> None:
    before = leaks.take_snapshot()
    leave: Callable[[], object] = LEFT[kind]
    with leave():  # type: ignore[attr-defined]
        (found,) = leaks.find_leaks(before, patience=0.2)
    assert found.startswith({"orphan": "process"}.get(kind, kind))
    assert leaks.find_leaks(before) == []


def test_a_job_folder_is_gone_afterwards() -> None:
    with job_folder() as job:
        assert job.name.startswith("renkei-")
        assert job.is_dir()
        (job / "something").touch()
    assert not job.exists()


def test_a_job_folder_is_gone_after_an_error_too() -> None:
    with pytest.raises(ZeroDivisionError), job_folder() as job:
        raise ZeroDivisionError
    assert not job.exists()
