"""The communicator "null" keeps what the contract says of sums; the rest doesn't depend on the algorithm."""

from contract.algorithm_contract import AlgorithmContract


class TestNull(AlgorithmContract):
    name = "null/gloo"
