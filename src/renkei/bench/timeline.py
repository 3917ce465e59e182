"""A timeline of training steps on all ranks, in the format of Chrome's trace viewer, which Perfetto shows too.

A row for each thread of each rank: what torch computes and sends, as its own profiler saw it, under the contestant's
name; and from when to when gradients were awaited.
"""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

from renkei.communicators.communicator import Communicator

AWAITED = "gradients awaited"
Awaited = tuple[float, float]  # from when to when, by time.perf_counter
Event = dict[str, Any]


def record(comm: Communicator, jobs: Mapping[str, Callable[[], Awaited | None]], steps: int = 3) -> list[Event]:
    """Let each job do some steps, and return what happened on all ranks, on every rank. A collective operation."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (comm.device.type == "cuda")
    awaited: list[Awaited | None] = []
    offset = time.time() - time.perf_counter()
    with profile(activities=activities) as profiler:
        for name, job in jobs.items():
            comm.barrier()
            with record_function(name):
                awaited += [job() for _ in range(steps)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        trace = json.loads(path.read_text())
    waits = [(begin + offset, end + offset) for begin, end in filter(None, awaited)]
    events = of_rank(comm.rank, trace, waits, thread=threading.get_native_id())
    return [event for events in comm.all_gather_object(events) for event in events]


def of_rank(rank: int, trace: Mapping[str, Any], waits: Sequence[Awaited], thread: int) -> list[Event]:
    """A rank's events: what it did, as torch's profiler wrote it, and its waits.

    Args:
        trace: with ``traceEvents`` in microseconds since ``baseTimeNanoseconds`` after 1970.
        waits: in seconds since 1970.
        thread: that waited.
    """
    base = trace["baseTimeNanoseconds"] / 1e9
    named = {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}}
    ordered = {"ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": rank}}
    did = [
        {**{key: event[key] for key in ("ph", "name", "cat", "ts", "dur", "tid")}, "pid": rank}
        for event in trace["traceEvents"]
        if event["ph"] == "X" and event.get("cat") != "Trace"
    ]
    waited = [
        {
            "ph": "X",
            "name": AWAITED,
            "cat": "renkei",
            "ts": round(1e6 * (begin - base), 3),
            "dur": round(1e6 * (end - begin), 3),
            "pid": rank,
            "tid": thread,
        }
        for begin, end in waits
    ]
    return [named, ordered, *did, *waited]


def write(path: Path, events: Sequence[Event]) -> None:
    """Write the events of all ranks."""
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
