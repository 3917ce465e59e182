"""The contract on ranks that are processes and outlive a test."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from contract.algorithm_contract import AlgorithmContract
from contract.communicator_contract import CommunicatorContract
from contract.served_ranks import ServedRanks


class ServedAlgorithm(AlgorithmContract):
    """Inherit, parametrize `spec`, and have a fixture `served` of a wider scope: by size, that many ranks."""

    @pytest.fixture
    def _ranks(self, served: Mapping[int, ServedRanks], spec: str) -> None:
        self.served, self.spec = served, spec
        for size in self.sizes:
            served[size].begin()  # all of them, before waiting for any
        for size in self.sizes:
            served[size].await_all()

    @pytest.fixture(autouse=True)
    def _nothing_is_left_behind(self, _ranks: None, _nothing_is_left_behind: None) -> None:
        """What is there is noted when the ranks are, for those that had to be started anew outlive the test."""

    def run(self, size: int, check: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        return self.served[size].run(check, *args, spec=self.spec, **options)


class ServedContract(ServedAlgorithm, CommunicatorContract):
    """The same with all that a communicator promises."""

    short_timeout = 0.8
