"""The communicator "null" keeps the contract."""

from contract.communicator_contract import CommunicatorContract


class TestNull(CommunicatorContract):
    name = "null/gloo"
