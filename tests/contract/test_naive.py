"""The communicator "naive" keeps the contract."""

from contract.algorithm_contract import AlgorithmContract
from contract.communicator_contract import CommunicatorContract


class TestNaive(CommunicatorContract):
    """The whole of it at two sizes: what doesn't depend on how sums are made is that of flat."""

    name = "naive/gloo"
    sizes = (1, 3)


class TestNaiveSums(AlgorithmContract):
    name = "naive/gloo"
    sizes = (2, 4)
