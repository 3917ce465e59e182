"""The example of hosts that come and go, on one host."""

from __future__ import annotations

import json
import random
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

from needs import linux
from processes import eventually, finish, start

pytestmark = linux

EXAMPLE = Path(__file__).parents[2] / "examples" / "edge" / "train.py"
ROUNDS = 16


def a_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        return int(unused.getsockname()[1])


def host(port: int, shard: int, *options: str) -> subprocess.Popen[str]:
    common = ["--store", f"127.0.0.1:{port}", "--shards", "3", "--rounds", str(ROUNDS), "--deadline", "3"]
    common += ["--pause", "0.015"]  # so that a round is long enough for what is to happen in it
    return start(str(EXAMPLE), *common, "--shard", str(shard), *(["--hold"] if shard == 0 else []), *options)


def result(output: str) -> Any:
    return json.loads(output.splitlines()[-1])


def test_one_leaves_one_joins_one_is_killed_and_those_that_are_left_have_the_same() -> None:
    """The training begins with three of the four, so the last that comes joins."""
    port = a_port()
    hosts = [host(port, shard, *(["--leave-after", "4"] if shard == 2 else [])) for shard in (0, 1, 2, 1)]
    killed = hosts[1]
    assert killed.stdout is not None
    assert eventually(lambda: "round 6 of" in killed.stdout.readline(), 40)
    time.sleep(random.uniform(0, 0.7))
    killed.send_signal(signal.SIGKILL)
    ended = finish(hosts, 40)
    assert [code for code, _ in ended] == [0, -signal.SIGKILL, 0, 0], ended
    results = [result(ended[at][1]) for at in (0, 2, 3)]
    assert [each["rounds"] for each in results] == [ROUNDS, results[1]["rounds"], ROUNDS]
    assert results[1]["rounds"] < ROUNDS
    assert results[0]["top1"] == results[2]["top1"] > 0.6
