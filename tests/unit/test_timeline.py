"""A timeline holds what every rank did, by rank, on one axis of time."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch

from renkei.bench.timeline import AWAITED, Awaited, of_rank, record, write
from renkei.communicators.communicator import Communicator
from renkei.testing import run_on_ranks

TRACE = {
    "baseTimeNanoseconds": 5_000_000_000,
    "traceEvents": [
        {"ph": "X", "name": "aten::mm", "cat": "cpu_op", "ts": 1.5, "dur": 2.0, "pid": 77, "tid": 78, "args": {}},
        {"ph": "s", "name": "fwdbwd", "ts": 1.5, "pid": 77, "tid": 78},
        {"ph": "X", "name": "PyTorch Profiler (0)", "cat": "Trace", "ts": 0.0, "dur": 9.0, "pid": "Spans", "tid": 0},
    ],
}


def test_processes_are_ranks_and_waits_are_on_the_axis_of_the_trace() -> None:
    named, ordered, did, waited = of_rank(3, TRACE, [(5.25, 5.5)], thread=78)
    assert named["args"] == {"name": "rank 3"}
    assert ordered["args"] == {"sort_index": 3}
    assert did == {"ph": "X", "name": "aten::mm", "cat": "cpu_op", "ts": 1.5, "dur": 2.0, "pid": 3, "tid": 78}
    assert waited == {
        "ph": "X", "name": AWAITED, "cat": "renkei", "ts": 250_000.0, "dur": 250_000.0, "pid": 3, "tid": 78
    }  # fmt: skip


def test_each_job_is_under_its_name_with_what_it_computed_and_awaited(tmp_path: Path) -> None:
    def job() -> Awaited:
        began = time.perf_counter()
        torch.ones(3, 5) @ torch.ones(5, 2)
        return began, time.perf_counter()

    def body(comm: Communicator) -> list[dict[str, Any]]:
        return record(comm, {"one": job, "two": lambda: None}, steps=2)

    (events,) = run_on_ranks(1, body)
    write(tmp_path / "timeline.json", events)
    spans = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"][2:]
    (one,) = (span for span in spans if span["name"] == "one")
    (two,) = (span for span in spans if span["name"] == "two")
    waits = [span for span in spans if span["name"] == AWAITED]
    products = [span for span in spans if span["name"] == "aten::mm"]
    assert len(waits) == len(products) == 2
    slack = 1000  # microseconds between the two clocks
    for wait, product in zip(waits, products, strict=True):
        assert wait["tid"] == one["tid"] == product["tid"]
        assert one["ts"] - slack <= wait["ts"] <= product["ts"] + slack
        assert product["ts"] + product["dur"] <= wait["ts"] + wait["dur"] + slack
    assert one["ts"] + one["dur"] <= two["ts"]
