"""The communicator "naive" keeps the contract."""

from contract.communicator_contract import CommunicatorContract


class TestNaive(CommunicatorContract):
    name = "naive/gloo"
