"""What was measured to be quickest for a topology, kept in a file from one job to the next.

`renkei bench all-reduce --save` measures and writes; `create_communicator` reads, on rank 0, and never measures.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from renkei.communicators.exchange_times import ExchangeTimes
from renkei.errors import UsageError

FILE_VARIABLE = "RENKEI_TUNING"  # names another file, or nothing at all, so that nothing is read


@dataclass(frozen=True)
class Tuning:
    """What to use for one topology.

    Attributes:
        communicator: as for `create_communicator`, with its backends.
        bucket_bytes: of gradients that are sent as one message.
        chunk_bytes: that a backend works on at a time; None for its own choice.
        measured_on: the date.
        milliseconds: what was measured, by what: the time to add `total_bytes` of gradients.
        total_bytes: how many there were.
        exchanges: how long exchanges take in each wire format; None in files from before that was measured.
    """

    communicator: str
    bucket_bytes: int
    chunk_bytes: int | None
    measured_on: str
    total_bytes: int = 0
    milliseconds: Mapping[str, float] = field(default_factory=dict)
    exchanges: ExchangeTimes | None = None


def key_of(nodes: Sequence[Hashable], device: str, processor: str) -> str:
    """What tells a topology from others: how many ranks its nodes have, on what.

    Args:
        nodes: by rank, something that tells its node.
        device: "cpu", or the name of the GPU.
        processor: its name and number of cores: home folders are shared by machines of different kinds.
    """
    per_node = sorted(Counter(nodes).values(), reverse=True)
    counts = ", ".join(f"{number} x {ranks}" for ranks, number in Counter(per_node).items())
    return f"nodes x ranks: {counts}; {device}; {processor}"


def path() -> Path | None:
    """The file: that of RENKEI_TUNING, or in the user's cache folder; None if that variable is empty."""
    named = os.environ.get(FILE_VARIABLE)
    if named is not None:
        return Path(named).expanduser() if named else None
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "renkei" / "tuning.json"


def recall_together(rank: int, store: dist.Store, key: str) -> Tuning | None:
    """What rank 0 finds for a topology, on every rank; so is its error.

    Args:
        store: where it leaves it for the others; nothing of the kind has been left there before.
    """
    if rank == 0:
        try:
            found = recall(key)
            store.set("tuning", json.dumps([None if found is None else asdict(found), None]))
        except UsageError as error:
            store.set("tuning", json.dumps([None, str(error)]))
    found, problem = json.loads(store.get("tuning"))
    if problem is not None:
        raise UsageError(problem)
    return None if found is None else _read_tuning(found)


def recall(key: str) -> Tuning | None:
    """What was found for a topology, if anything.

    Raises:
        UsageError: the file can't be read as what `remember` writes.
    """
    file = path()
    if file is None or not file.exists():
        return None
    found = _read(file).get(key)
    try:
        return None if found is None else _read_tuning(found)
    except (TypeError, ValueError, AttributeError) as error:
        raise _broken(file, error) from None


def remember(key: str, tuning: Tuning) -> Path:
    """Write down what was found for a topology; what is known of others stays. Returns the file.

    Raises:
        UsageError: no file is named, or it can't be read or written.
    """
    file = path()
    if file is None:
        raise UsageError(f"{FILE_VARIABLE} is empty, so there is no file to save to; unset it, or let it name one")
    known = _read(file) if file.exists() else {}
    known[key] = asdict(tuning)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, suffix=".partial", delete=False) as partial:
            json.dump(known, partial, indent=2)
        os.replace(partial.name, file)  # whoever reads sees the old or the new one
    except OSError as error:
        raise UsageError(f"can't save to {file}: {error.strerror}; let {FILE_VARIABLE} name another file") from None
    return file


def _read_tuning(found: Mapping[str, Any]) -> Tuning:
    tuning = Tuning(**found)
    exchanges = found.get("exchanges")
    return tuning if exchanges is None else replace(tuning, exchanges=ExchangeTimes(**exchanges))


def _read(file: Path) -> dict[str, Any]:
    try:
        known = json.loads(file.read_text())
        if not isinstance(known, dict):
            raise ValueError(f"it holds a {type(known).__name__}")
    except (OSError, ValueError) as error:
        raise _broken(file, error) from None
    return known


def _broken(file: Path, error: Exception) -> UsageError:
    return UsageError(f"{file} isn't what renkei bench all-reduce --save writes ({error}); remove it and save anew")
