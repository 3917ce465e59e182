"""What every communicator must do, as a class to inherit from: name the communicator, and say how to run ranks.

The checks themselves are functions of one rank's communicator, in the modules beside this one. They share nothing
between ranks but messages and what they return, so ranks may be threads or processes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from contract import membership, messages, mistakes, movement, reductions
from contract.algorithm_contract import HANG, AlgorithmContract, several_ranks
from contract.values import DTYPES, SUMMED, for_each_dtype


class CommunicatorContract(AlgorithmContract):
    """All that a communicator promises.

    Attributes:
        short_timeout: seconds in which ranks that come at once are sure to meet.
    """

    short_timeout: ClassVar[float] = 0.3

    # -- tensors --------------------------------------------------------------------------------------------------

    def test_every_dtype_moves(self, size: int) -> None:
        self.run(size, for_each_dtype, movement.check_dtype, DTYPES)

    @pytest.mark.parametrize(
        "check",
        [
            movement.check_layouts,
            movement.check_shapes_by_rank,
            movement.check_all_to_all_shapes_by_pair,
            movement.check_broadcast_into,
            movement.check_results_are_own,
        ],
    )
    def test_movement(self, size: int, check: Callable[..., Any]) -> None:
        self.run(size, check)

    def test_every_reduction_of_every_dtype(self, size: int) -> None:
        self.run(size, for_each_dtype, reductions.check_dtype, SUMMED)

    @pytest.mark.parametrize("check", [reductions.check_layouts, reductions.check_non_finite_numbers_survive])
    def test_reductions(self, size: int, check: Callable[..., Any]) -> None:
        self.run(size, check)

    # -- messages and objects -------------------------------------------------------------------------------------

    @several_ranks
    @pytest.mark.parametrize(
        "check",
        [
            messages.check_tensors_go_round,
            messages.check_kinds_are_kept,
            messages.check_tags,
            messages.check_objects_go_round,
            messages.check_kinds_that_do_not_fit,
            messages.check_another_default_device,
        ],
    )
    def test_messages(self, size: int, check: Callable[..., Any]) -> None:
        self.run(size, check)

    @pytest.mark.parametrize(
        "check",
        [
            messages.check_wrong_peers,
            messages.check_objects,
            messages.check_objects_are_combined_in_order,
            messages.check_chunks,
        ],
    )
    def test_objects(self, size: int, check: Callable[..., Any]) -> None:
        self.run(size, check)

    # -- mistakes -------------------------------------------------------------------------------------------------

    def test_a_wrong_call_is_refused_on_all_ranks(self, size: int) -> None:
        calls = mistakes.WRONG | mistakes.WRONG_ON_ROOT | (mistakes.MIXED if size > 1 else {})
        by_rank = self.run(size, mistakes.check_refused, calls)
        assert {name for name, (kind, _) in mistakes.assert_one_error(by_rank).items() if kind != "UsageError"} == set()

    @several_ranks
    def test_a_call_wrong_on_one_rank_names_it_on_all(self, size: int) -> None:
        by_rank = self.run(size, mistakes.check_refused, mistakes.only_last_is_wrong(mistakes.WRONG))
        for name, (_, text) in mistakes.assert_one_error(by_rank).items():
            assert f"rank {size - 1}" in text, name

    @several_ranks
    def test_calls_that_do_not_fit_are_one_error_on_all_ranks(self, size: int) -> None:
        by_rank = self.run(size, mistakes.check_refused, mistakes.MISMATCHED)
        for name, (kind, text) in mistakes.assert_one_error(by_rank).items():
            assert kind == "MismatchError", name
            assert f"rank {size - 1} calls" in text, name
            mistakes.assert_tells_difference(text)

    # -- life and death -------------------------------------------------------------------------------------------

    def test_nobody_leaves_a_barrier_before_all_have_come(self, size: int) -> None:
        came, left = zip(*self.run(size, membership.check_barrier_waits), strict=True)
        assert max(came) <= min(left)

    @several_ranks
    def test_a_barrier_names_those_missing_on_all_ranks(self, size: int) -> None:
        (text,) = set(self.run(size, membership.check_barrier_names_the_missing))
        missing = [rank for rank in (size - 2, size - 1) if rank > 0]
        names = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))} had not come"
        assert names in text

    @several_ranks
    @pytest.mark.parametrize("wait", membership.WAITS.values(), ids=membership.WAITS)
    def test_waiting_for_a_rank_that_has_ended_is_an_error_soon(self, size: int, wait: Callable[..., Any]) -> None:
        assert max(self.run(size, membership.check_peer_lost, wait, timeout=2 * HANG)) < HANG

    def test_closing_reaches_those_that_wait(self) -> None:
        *noticed, ended = self.run(max(self.sizes), membership.check_close_is_noticed, timeout=2 * HANG)
        assert max(noticed) < ended

    @several_ranks
    def test_no_wait_is_longer_than_the_timeout(self, size: int) -> None:
        self.run(size, membership.check_deadline, timeout=self.short_timeout)
