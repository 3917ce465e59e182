"""The communicators keep the contract on ranks that mpiexec has started."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest

from contract.served_contract import ServedAlgorithm, ServedContract
from contract.served_ranks import ServedRanks, mpiexec, serve
from needs import mpich

pytestmark = [mpich, pytest.mark.timeout(150)]  # the first test may wait for ten processes that import torch


@pytest.fixture(scope="module")
def served() -> Iterator[Mapping[int, ServedRanks]]:
    with serve(ServedContract.sizes, mpiexec) as by_size:
        yield by_size


@pytest.mark.parametrize("spec", ["flat/gloo"])
class TestContract(ServedAlgorithm):
    """For what doesn't talk over MPI, how ranks were started is all that differs."""

    sizes = (3,)


@pytest.mark.parametrize("spec", ["flat/mpi"])
class TestContractOverMpi(ServedContract):
    """It can't be tested on threads."""

    sizes = (3,)


@pytest.mark.parametrize("spec", ["flat/mpi"])
class TestSumsOverMpi(ServedAlgorithm):
    sizes = (2,)


@pytest.mark.parametrize("spec", ["naive/mpi", "two_dimensional/shared_memory+mpi", "hierarchical/mpi+mpi"])
class TestAlgorithm(ServedAlgorithm):
    sizes = (3,)
