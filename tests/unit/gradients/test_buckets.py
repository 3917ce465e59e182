from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from renkei.gradients.buckets import ALIGNMENT, Bucket, BucketSizes, GradientSize, Slot, fingerprint, plan_buckets

TAIL = 7
TAIL_KIND = "cpu/float32"
KINDS = {  # itemsize, is_exact
    "cpu/float32": (4, True),
    "cpu/float64": (8, True),
    "cuda:0/float32": (4, True),
    "cpu/bfloat16": (2, False),
    "cpu/complex64": (8, False),
    "cpu/complex128": (16, False),
}
EXACT = [kind for kind, (_, is_exact) in KINDS.items() if is_exact]


def gradient(numel: int, kind: str = "cpu/float32") -> GradientSize:
    itemsize, is_exact = KINDS[kind]
    return GradientSize(numel, itemsize, kind, is_exact)


def plan(sizes: Sequence[GradientSize], order: Sequence[int] | None = None, first: int = 64, rest: int = 256):
    return plan_buckets(
        sizes,
        range(len(sizes)) if order is None else order,
        tail=TAIL,
        tail_kind=TAIL_KIND,
        limits=BucketSizes(first=first, rest=rest),
    )


@st.composite
def cases(draw: st.DrawFn, kinds: Sequence[str] = tuple(KINDS)):
    """Gradients, an order, and limits of which the first isn't larger than the rest."""
    sizes = draw(st.lists(st.builds(gradient, st.integers(0, 60), st.sampled_from(kinds)), max_size=25))
    order = draw(st.permutations(range(len(sizes))))
    first, rest = sorted(draw(st.tuples(st.integers(1, 600), st.integers(1, 600))))
    return sizes, order, first, rest


# -- what holds of every plan -----------------------------------------------------------------------------------------


def check_every_gradient_once(buckets: Sequence[Bucket], sizes: Sequence[GradientSize]) -> None:
    slots = [slot for bucket in buckets for slot in bucket.slots]
    assert sorted(slot.parameter for slot in slots) == list(range(len(sizes)))
    assert all(slot.numel == sizes[slot.parameter].numel for slot in slots)


def check_no_overlap(buckets: Sequence[Bucket]) -> None:
    for bucket in buckets:
        end = 0
        for slot in bucket.slots:
            assert slot.offset >= end
            end = slot.offset + slot.numel
        assert bucket.body == end
        assert bucket.numel == bucket.body + bucket.tail


def check_alignment(buckets: Sequence[Bucket], sizes: Sequence[GradientSize]) -> None:
    for bucket in buckets:
        assert all(slot.offset * sizes[slot.parameter].itemsize % ALIGNMENT == 0 for slot in bucket.slots)


def check_kinds_apart(buckets: Sequence[Bucket], sizes: Sequence[GradientSize]) -> None:
    for bucket in buckets:
        assert all(sizes[at].kind == bucket.kind for at in bucket.parameters)


def check_order(buckets: Sequence[Bucket], sizes: Sequence[GradientSize], order: Sequence[int]) -> None:
    for kind in KINDS:
        sent = [at for bucket in buckets if bucket.kind == kind for at in bucket.parameters]
        assert sent == [at for at in order if sizes[at].kind == kind]


def check_limits(buckets: Sequence[Bucket], sizes: Sequence[GradientSize], first: int, rest: int) -> None:
    """A bucket is closed as soon as it is full; only the last of each kind, and the first of all, may be smaller."""
    filled = [bucket for bucket in buckets if bucket.slots]
    too_small = 0
    for at, bucket in enumerate(filled):
        itemsize = sizes[bucket.parameters[0]].itemsize
        before_last = bucket.slots[-2].offset + bucket.slots[-2].numel if len(bucket.slots) > 1 else 0
        assert before_last * itemsize < (rest if at else first)
        too_small += bucket.body * itemsize < rest
    assert too_small <= len({bucket.kind for bucket in filled}) + 1


def check_tail(buckets: Sequence[Bucket]) -> None:
    """It is in the last bucket, after all gradients, in a dtype that holds it exactly."""
    *others, last = buckets
    assert all(bucket.tail == 0 for bucket in others)
    assert last.tail == TAIL
    assert last.kind in EXACT


@given(cases())
def test_every_gradient_is_in_one_bucket_once(case) -> None:
    check_every_gradient_once(plan(*case), case[0])


@given(cases())
def test_gradients_do_not_overlap(case) -> None:
    check_no_overlap(plan(*case))


@given(cases())
def test_each_gradient_begins_at_a_cache_line(case) -> None:
    check_alignment(plan(*case), case[0])


@given(cases())
def test_a_bucket_holds_one_device_and_dtype(case) -> None:
    check_kinds_apart(plan(*case), case[0])


@given(cases())
def test_gradients_of_a_kind_leave_in_the_order_asked_for(case) -> None:
    check_order(plan(*case), case[0], case[1])


@given(cases(kinds=["cpu/float32"]))
def test_with_one_kind_all_gradients_leave_in_the_order_asked_for(case) -> None:
    sizes, order, *_ = case
    assert [at for bucket in plan(*case) for at in bucket.parameters] == list(order), sizes


@given(cases())
def test_buckets_are_closed_at_their_size(case) -> None:
    sizes, _, first, rest = case
    check_limits(plan(*case), sizes, first, rest)


@given(cases())
def test_the_tail_is_exact_and_leaves_last(case) -> None:
    check_tail(plan(*case))


@given(cases())
def test_the_same_input_gives_the_same_fingerprint(case) -> None:
    assert fingerprint(plan(*case)) == fingerprint(plan(*case))


# -- examples ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["cpu/bfloat16", "cpu/complex64"])
def test_a_model_whose_dtype_is_not_exact_gets_a_bucket_for_the_tail_alone(kind: str) -> None:
    *gradients, last = plan([gradient(10, kind), gradient(20, kind)])
    assert last == Bucket(TAIL_KIND, (), 0, TAIL)
    assert all(bucket.kind == kind for bucket in gradients)


def test_a_model_without_gradients_still_sends_the_tail() -> None:
    assert plan([]) == (Bucket(TAIL_KIND, (), 0, TAIL),)


def test_the_tail_rides_with_gradients_where_it_can() -> None:
    buckets = plan([gradient(3, "cpu/bfloat16"), gradient(5, "cpu/float64")])
    assert [bucket.kind for bucket in buckets] == ["cpu/bfloat16", "cpu/float64"]
    assert buckets[-1].tail == TAIL


def test_the_first_bucket_has_a_limit_of_its_own() -> None:
    buckets = plan([gradient(16)] * 8, first=64, rest=128)
    assert [len(bucket.slots) for bucket in buckets] == [1, 2, 2, 2, 1]


@pytest.mark.parametrize("order", [[0, 1], [0, 1, 1], [0, 1, 2, 3], [1, 2, 3]])
def test_an_order_that_is_none_is_refused(order: list[int]) -> None:
    with pytest.raises(ValueError, match="exactly once"):
        plan([gradient(1)] * 3, order)


def test_gpus_of_different_numbers_have_the_same_plan() -> None:
    on_gpu = [GradientSize(numel=9, itemsize=4, kind=f"cuda:{number}/float32", is_exact=True) for number in (0, 11)]
    first, second = (plan([each, gradient(8)]) for each in on_gpu)
    assert fingerprint(first) == fingerprint(second)
    assert fingerprint(first) != fingerprint(plan([gradient(9), gradient(8)]))


@pytest.mark.parametrize(
    "other",
    [
        plan([gradient(8), gradient(9)]),
        plan([gradient(9), gradient(8)], [1, 0]),
        plan([gradient(9, "cpu/float64"), gradient(8)]),
        plan([gradient(9), gradient(8), gradient(0)]),
        plan([gradient(9), gradient(8)], rest=1, first=1),
    ],
)
def test_different_plans_have_different_fingerprints(other: tuple[Bucket, ...]) -> None:
    assert fingerprint(other) != fingerprint(plan([gradient(9), gradient(8)]))


# -- the checks see what they are there for ---------------------------------------------------------------------------

SIZES = [gradient(20), gradient(3), gradient(30, "cpu/float64"), gradient(17), gradient(40), gradient(2)]
GOOD = plan(SIZES)


def change_slot(**changes: int) -> tuple[Bucket, ...]:
    """The good plan with one slot of the first bucket that has two changed."""
    at = next(at for at, bucket in enumerate(GOOD) if len(bucket.slots) > 1)
    first, second, *rest = GOOD[at].slots
    bucket = replace(GOOD[at], slots=(first, replace(second, **changes), *rest))
    return (*GOOD[:at], bucket, *GOOD[at + 1 :])


@pytest.mark.parametrize(
    ("check", "defective"),
    [
        (lambda buckets: check_every_gradient_once(buckets, SIZES), GOOD[1:]),
        (lambda buckets: check_every_gradient_once(buckets, SIZES), (*GOOD, GOOD[0])),
        (check_no_overlap, change_slot(offset=1)),
        (lambda buckets: check_alignment(buckets, SIZES), change_slot(offset=1)),
        (lambda buckets: check_kinds_apart(buckets, SIZES), change_slot(parameter=2)),
        (lambda buckets: check_order(buckets, SIZES, range(6)), change_slot(parameter=0)),
        (lambda buckets: check_limits(buckets, SIZES, 64, 256), plan(SIZES, first=64, rest=64)),
        (lambda buckets: check_limits(buckets, SIZES, 64, 256), plan(SIZES, first=300, rest=300)),
        (check_tail, (*GOOD[:-1], replace(GOOD[-1], tail=0))),
        (check_tail, (replace(GOOD[-1], kind="cpu/bfloat16"),)),
        (check_tail, (replace(GOOD[0], tail=TAIL), *GOOD[1:])),
    ],
)
def test_red_twin_of_each_check(check: Callable[[Sequence[Bucket]], None], defective: tuple[Bucket, ...]) -> None:
    check(GOOD)
    with pytest.raises(AssertionError):
        check(defective)


def test_red_twin_a_tail_of_bfloat16_is_seen() -> None:
    wrong = [replace(size, is_exact=True) for size in [gradient(3, "cpu/bfloat16")] * 2]
    with pytest.raises(AssertionError):
        check_tail(plan(wrong))


def test_slots_are_counted_in_elements() -> None:
    (bucket,) = plan([gradient(3, "cpu/float64"), gradient(3, "cpu/float64")], first=1000, rest=1000)
    assert bucket.slots == (Slot(0, 0, 3), Slot(1, 8, 3))
