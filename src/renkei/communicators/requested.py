"""What a communicator's name asks for. Texts only; imports no torch, so that commands can check names at once."""

from __future__ import annotations

from dataclasses import dataclass

from renkei.errors import UsageError
from renkei.names import check_known

BACKENDS = ("gloo", "mpi", "nccl", "shared_memory")
AUTO = "auto"  # whatever suits
TWO_LEVEL = ("hierarchical", "staged", "two_dimensional")
ALGORITHMS = ("flat", "naive", "null", "single_node", *TWO_LEVEL)
CHAINERMN = {"dummy": "null", "non_cuda_aware": "staged", "pure_nccl": "flat/nccl"}  # whose other names are the same


@dataclass(frozen=True)
class Requested:
    """What is asked for; None where it is left open.

    Attributes:
        algorithm: one of `ALGORITHMS`.
        backend: one of `BACKENDS`; of two-level algorithms, the one between nodes.
        backend_within: of two-level algorithms, the one within nodes.
    """

    algorithm: str | None = None
    backend: str | None = None
    backend_within: str | None = None

    def __str__(self) -> str:
        backends = "+".join(filter(None, (self.backend_within, self.backend)))
        return "/".join(filter(None, (self.algorithm, backends)))


def read_name(name: str, backend: str | None = None) -> Requested:
    """What a name such as "two_dimensional/shared_memory+gloo" asks for, and a backend given apart from it.

    Raises:
        UsageError: it is unknown or contradicts itself.
    """
    algorithm, slash, in_name = CHAINERMN.get(name, name).partition("/")
    check_known("communicator", algorithm, (AUTO, *ALGORITHMS, *CHAINERMN))
    if slash and backend not in (None, in_name):
        raise UsageError(f"communicator {name!r} and backend={backend!r} contradict each other; give one of them")
    backends = in_name if slash else backend
    wanted = None if algorithm == AUTO else algorithm
    if backends is None:
        return Requested(wanted)
    within, plus, between = backends.partition("+")
    for each in (within, between) if plus else (within,):
        check_known("backend", each, BACKENDS)
    if plus and algorithm not in (AUTO, *TWO_LEVEL):
        raise UsageError(
            f"backend {backends!r} names one within nodes and one between them, which communicator {algorithm!r} does "
            f"not tell apart; use one of {', '.join(TWO_LEVEL)}, or one backend"
        )
    if plus:
        return Requested(wanted, between, within)
    return Requested(wanted, within, within if algorithm in TWO_LEVEL else None)
