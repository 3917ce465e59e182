"""The communicator "null" keeps the contract."""

from contract.algorithm_contract import AlgorithmContract
from contract.communicator_contract import CommunicatorContract


class TestNull(CommunicatorContract):
    """The whole of it at two sizes: what doesn't depend on how sums are made is that of flat."""

    name = "null/gloo"
    sizes = (1, 3)


class TestNullSums(AlgorithmContract):
    name = "null/gloo"
    sizes = (2, 4)
