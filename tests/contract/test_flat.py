"""The communicator "flat" keeps the contract."""

from contract.communicator_contract import CommunicatorContract


class TestFlat(CommunicatorContract):
    name = "flat/gloo"
