"""What was measured is kept by topology, read by all ranks alike, and never believed where it makes no sense."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from meeting import together
from renkei.bench.probing import BUCKETS, Candidate, choose
from renkei.communicators import tuning
from renkei.communicators.exchange_times import ExchangeTimes
from renkei.communicators.factory import create_communicator, tuning_key
from renkei.communicators.job import join
from renkei.communicators.tuning import Tuning, key_of, recall, recall_together, remember
from renkei.errors import UsageError

TIMES = ExchangeTimes([10, 1000], {"fp32": [1.5, 2.5]}, {"fp32": [0.5, 1.0]})
FOUND = Tuning("flat/gloo", 2**21, None, "2026-11-30", 2**24, {"flat/gloo, 2 MiB buckets": 12.5}, TIMES)


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "folder" / "tuning.json"
    monkeypatch.setenv(tuning.FILE_VARIABLE, str(path))
    return path


def test_what_was_remembered_is_recalled_by_topology(file: Path) -> None:
    assert recall("two") is None
    assert remember("two", FOUND) == file
    remember("four", other := Tuning("flat/shared_memory", 2**20, 2**16, "2026-12-01"))
    assert (recall("two"), recall("four"), recall("three")) == (FOUND, other, None)
    assert [each.name for each in file.parent.iterdir()] == [file.name]  # nothing half written is left


@pytest.mark.parametrize(
    ("nodes", "counts"), [("a", "1 x 1"), ("aab", "1 x 2, 1 x 1"), ("abab", "2 x 2"), ("baaac", "1 x 3, 2 x 1")]
)
def test_a_topology_is_how_many_ranks_its_nodes_have(nodes: str, counts: str) -> None:
    assert key_of(nodes, "cpu", "fast, 2 cores") == f"nodes x ranks: {counts}; cpu; fast, 2 cores"


def test_a_file_from_before_exchanges_were_timed_is_read(file: Path) -> None:
    file.parent.mkdir()
    kept = {"communicator": "flat/gloo", "bucket_bytes": 4, "chunk_bytes": None, "measured_on": "2026-11-30"}
    file.write_text(json.dumps({"two": kept}))
    assert recall("two") == Tuning("flat/gloo", 4, None, "2026-11-30", exchanges=None)


KEPT = '"communicator": "flat", "bucket_bytes": 4, "chunk_bytes": 4, "measured_on": ""'


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        '{"two": {"communicator": 3, "buckets": 4}}',
        '{"two": 3}',
        f'{{"two": {{{KEPT}, "exchanges": 3}}}}',
        f'{{"two": {{{KEPT}, "exchanges": {{"numbers": [1, 2]}}}}}}',
        f'{{"two": {{{KEPT}, "exchanges": {{"numbers": [1], "milliseconds": {{}}, "processor_milliseconds": {{}}}}}}}}',
    ],
)
def test_a_file_that_makes_no_sense_is_told_with_the_fix(text: str, file: Path) -> None:
    file.parent.mkdir()
    file.write_text(text)
    with pytest.raises(UsageError, match=r"tuning.json isn't what renkei bench .* writes .*; remove it and save anew"):
        recall("two")


def test_its_error_is_the_same_on_all_ranks(file: Path) -> None:
    file.parent.mkdir()
    file.write_text("[]")
    store = dist.HashStore()
    errors = together(*(lambda rank=rank: recall_together(rank, store, "two") for rank in range(3)))
    assert len({str(error) for error in errors}) == 1
    assert all(isinstance(error, UsageError) for error in errors)


def test_rank_0_reads_for_all(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remember("two", FOUND)
    store = dist.HashStore()
    assert recall_together(0, store, "two") == FOUND
    file.unlink()  # another host has none
    assert recall_together(1, store, "two") == FOUND


def test_no_file_is_read_or_written_where_the_variable_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tuning.FILE_VARIABLE, "")
    assert recall("two") is None
    with pytest.raises(UsageError, match="RENKEI_TUNING is empty"):
        remember("two", FOUND)


def test_a_folder_that_can_not_be_written_is_told(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.parent.write_text("a file where the folder should be")
    with pytest.raises(UsageError, match=r"can't save to .*tuning.json: .*; let RENKEI_TUNING name another"):
        remember("two", FOUND)


def test_a_communicator_is_made_as_was_measured_unless_it_is_asked_for_another() -> None:
    key = tuning_key(join().nodes, torch.device("cpu"))
    remember(key, Tuning("naive/gloo", 2**21, None, "2026-11-30"))
    with create_communicator() as comm:
        assert (comm.name, comm.options.backend, comm.bucket_sizes.rest) == ("naive", "gloo", 2**21)
    for arguments in ({"name": "flat"}, {"backend": "shared_memory"}, {"virtual_ranks": 4}):
        with create_communicator(**arguments) as comm:  # type: ignore[arg-type]
            assert (comm.name, comm.bucket_sizes.rest) == ("flat", 2**22)


# Milliseconds by size of bucket, and the size that is chosen.
TIMES: list[tuple[Sequence[float], int]] = [
    ([9.0, 9.5, 9.9], BUCKETS[0]),
    ([12.0, 9.5, 9.0], BUCKETS[1]),
    ([12.0, 11.0, 9.0], BUCKETS[2]),
]


@pytest.mark.parametrize(("times", "chosen"), TIMES)
def test_the_smallest_buckets_that_are_nearly_the_quickest_are_chosen(times: Sequence[float], chosen: int) -> None:
    slower = {Candidate("flat/gloo", bucket): 0.020 for bucket in BUCKETS}
    other_chunk = {Candidate("flat/shared_memory", bucket, 2**16): 0.0091 for bucket in BUCKETS[:1]}
    best = {
        Candidate("flat/shared_memory", bucket, 2**18): own / 1000 for bucket, own in zip(BUCKETS, times, strict=True)
    }
    found = choose(slower | other_chunk | best)
    assert (found.communicator, found.bucket_bytes, found.chunk_bytes) == ("flat/shared_memory", chosen, 2**18)
    assert len(found.milliseconds) == 7
    assert json.dumps(found.milliseconds)
