"""The communicators keep the contract on hosts that have one or several ranks, over cables of limited speed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from subprocess import Popen
from typing import IO, Any, ClassVar

import pytest

from contract.served_contract import ServedAlgorithm, ServedContract
from contract.served_ranks import SERVER, Launcher, ServedRanks, serve
from lab.hosts import Hosts

ALGORITHMS = ["hierarchical/shared_memory+gloo", "staged/shared_memory+gloo", "two_dimensional/shared_memory+gloo"]
UNEVEN, EVEN = "0102", "0123"  # by rank, the number of its host
pytestmark = pytest.mark.timeout(120)  # some tests wait for processes that import torch


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with Hosts(4) as four:
        yield four


@pytest.fixture(scope="module")
def served_by_place(hosts: Hosts) -> Iterator[Mapping[str, Mapping[int, ServedRanks]]]:
    with serve([4], ranks_on(hosts, UNEVEN)) as uneven, serve([4], ranks_on(hosts, EVEN)) as even:
        yield {UNEVEN: uneven, EVEN: even}


def ranks_on(hosts: Hosts, place: str) -> Launcher:
    """Starts each rank on the host whose number is at its place."""

    def launcher(size: int, variables: Mapping[str, str], output: IO[str]) -> list[Popen[str]]:
        meeting = {"MASTER_ADDR": hosts.address(int(place[0])), "MASTER_PORT": "23456", "WORLD_SIZE": str(size)}
        common = {**meeting, **variables, "OMP_NUM_THREADS": "1"}
        return [
            hosts.start(int(host), sys.executable, *SERVER, output=output, RANK=str(rank), **common)
            for rank, host in enumerate(place)
        ]

    return launcher


@pytest.fixture(scope="class")
def served(
    request: pytest.FixtureRequest, hosts: Hosts, served_by_place: Mapping[str, Mapping[int, ServedRanks]]
) -> Mapping[int, ServedRanks]:
    for host in range(4):
        hosts.shape(host, request.cls.rate)
    return served_by_place[request.cls.place]


class OnHosts(ServedAlgorithm):
    """Set `place`, where the four ranks are, and `rate`, what the cables carry."""

    place: ClassVar[str]
    rate: ClassVar[str]
    sizes = (4,)

    def __init_subclass__(cls) -> None:
        cls.places = (cls.place,) if "place" in vars(cls) else ()

    def run(
        self, size: int, check: Callable[..., Any], *args: Any, nodes: Sequence[str] = "", **options: Any
    ) -> list[Any]:
        """No rank pretends to be anywhere: `nodes` are where they are."""
        return super().run(size, check, *args, **options)


@pytest.mark.parametrize("spec", ["flat/gloo"])
class TestContractOnFourHosts(OnHosts, ServedContract):
    place, rate = EVEN, "100mbit"


@pytest.mark.parametrize("spec", ["flat/gloo", *ALGORITHMS])
class TestAlgorithmOnUnevenHosts(OnHosts):
    place, rate = UNEVEN, "100mbit"


@pytest.mark.parametrize("spec", ALGORITHMS)
class TestAlgorithmOnFourHosts(OnHosts):
    place, rate = EVEN, "1000mbit"
