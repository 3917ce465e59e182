from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from renkei.gradients.buckets import BucketSizes, plan_buckets
from renkei.gradients.flat import FlatGradients, size_of

TAIL = 5
ONE = torch.tensor(1.0, dtype=torch.float64)


def flatten(parameters: Sequence[Parameter], first: int = 2**20) -> FlatGradients:
    plan = plan_buckets(
        [size_of(parameter) for parameter in parameters],
        range(len(parameters))[::-1],
        tail=TAIL,
        tail_kind="cpu/float32",
        limits=BucketSizes(first=first, rest=first),
    )
    return FlatGradients(parameters, plan, lambda numel, dtype, device: torch.zeros(numel, dtype=dtype, device=device))


def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> Parameter:
    return Parameter(torch.zeros(shape, dtype=dtype))


def ramp(like: Tensor, start: int = 1) -> Tensor:
    """A gradient no two elements of which are equal, with the parameter's own strides."""
    values = torch.arange(start, start + like.numel(), dtype=torch.float32).reshape(like.shape)
    return torch.empty_like(like).copy_(values).detach()


SHAPES = {
    "a matrix": parameter(3, 4),
    "a vector": parameter(7),
    "a scalar": parameter(),
    "nothing": parameter(0),
    "nothing in two dimensions": parameter(3, 0),
    "half": parameter(3, 5, dtype=torch.float16),
    "bfloat16": parameter(9, dtype=torch.bfloat16),
    "double": parameter(2, 2, dtype=torch.float64),
    "complex": parameter(4, 3, dtype=torch.complex64),
    "complex double": parameter(3, dtype=torch.complex128),
    "channels last": Parameter(torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)),
    "channels last in 3-D": Parameter(torch.zeros(2, 3, 2, 2, 2).to(memory_format=torch.channels_last_3d)),
    "transposed": Parameter(torch.zeros(4, 3).t()),
    "expanded": Parameter(torch.zeros(1).expand(6)),
    "with gaps": Parameter(torch.zeros(6, 4)[::2, ::2]),
}


def check_round_trip(parameters: Sequence[Parameter], scale: float) -> None:
    """Packed gradients are in the buffers and in ``.grad``, scaled, in place, and beside one another."""
    flat = flatten(parameters, first=100)
    given = [ramp(each, start) for start, each in enumerate(parameters, 1)]
    for at, each in enumerate(parameters):
        each.grad = given[at].clone(memory_format=torch.preserve_format)
        flat.pack(at, torch.tensor(scale, dtype=torch.float64))
    pieces = {piece.data_ptr() for pieces in flat.pieces for piece in pieces}
    for each, gradient in zip(parameters, given, strict=True):
        assert each.grad is not None
        torch.testing.assert_close(each.grad, gradient * scale, rtol=1e-3, atol=0)
        assert not each.numel() or each.grad.data_ptr() in pieces
    assert sum(int(buffer.count_nonzero()) for buffer in flat.buffers) == sum(each.numel() for each in parameters)


def fresh(names: Sequence[str] = tuple(SHAPES)) -> list[Parameter]:
    return [Parameter(SHAPES[name].detach()) for name in names]


@pytest.mark.parametrize("name", SHAPES)
def test_a_gradient_of_any_shape_and_dtype_goes_in_and_out(name: str) -> None:
    check_round_trip(fresh([name]), scale=0.5)


def test_gradients_of_all_shapes_and_dtypes_lie_beside_one_another() -> None:
    check_round_trip(fresh(), scale=0.25)


@pytest.mark.parametrize("name", ["a matrix", "channels last", "channels last in 3-D", "transposed", "a scalar"])
def test_gradients_have_the_strides_of_dense_parameters(name: str) -> None:
    (each,) = fresh([name])
    flat = flatten([each])
    flat.hand_out(0)
    assert each.grad is not None
    assert each.grad.stride() == each.stride()


@pytest.mark.parametrize("name", ["expanded", "with gaps"])
def test_gradients_of_parameters_with_gaps_or_overlaps_are_contiguous(name: str) -> None:
    (each,) = fresh([name])
    flatten([each]).hand_out(0)
    assert each.grad is not None
    assert each.grad.is_contiguous()


def test_a_gradient_whose_strides_are_not_the_parameters_is_packed_right() -> None:
    each = Parameter(torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last))
    gradient = torch.arange(120.0).reshape(2, 3, 4, 5)
    each.grad = gradient.clone()
    flatten([each]).pack(0, ONE)
    assert torch.equal(each.grad, gradient)


def test_packing_what_is_already_in_place_scales_it_once_more() -> None:
    each = parameter(3)
    flat = flatten([each])
    each.grad = torch.tensor([2.0, 4.0, 6.0])
    for _ in range(2):
        flat.pack(0, torch.tensor(0.5, dtype=torch.float64))
    assert each.grad.tolist() == [0.5, 1.0, 1.5]


def test_a_gradient_with_a_graph_is_packed_without_it() -> None:
    each = parameter(3)
    flat = flatten([each])
    weight = torch.ones(3, requires_grad=True)
    each.grad = weight * 2
    flat.pack(0, ONE)
    assert not each.grad.requires_grad
    assert not flat.buffers[0].requires_grad


def test_each_view_handed_out_is_a_new_tensor_on_the_same_memory() -> None:
    each = parameter(3)
    flat = flatten([each])
    flat.hand_out(0)
    first = each.grad
    flat.hand_out(0)
    assert first is not each.grad
    assert first is not None
    assert each.grad is not None
    assert first.data_ptr() == each.grad.data_ptr()


def test_clearing_one_gradient_leaves_its_neighbours() -> None:
    parameters = [parameter(3), parameter(4)]
    flat = flatten(parameters)
    for at, each in enumerate(parameters):
        each.grad = ramp(each)
        flat.pack(at, ONE)
    flat.clear(0)
    grads = [each.grad for each in parameters]
    assert [grad.tolist() for grad in grads if grad is not None] == [[0, 0, 0], [1, 2, 3, 4]]


def test_scaling_changes_all_gradients_and_not_the_tail() -> None:
    parameters = [parameter(3), parameter(2, dtype=torch.float64), parameter(2, dtype=torch.bfloat16)]
    flat = flatten(parameters)
    flat.tail.fill_(3)
    for at, each in enumerate(parameters):
        each.grad = torch.ones_like(each)
        flat.pack(at, ONE)
    flat.scale(2.0)
    assert all(each.grad is not None and each.grad.eq(2).all() for each in parameters)
    assert flat.tail.tolist() == [3.0] * TAIL


def test_pieces_are_the_gradients_and_the_tail_and_share_the_buffers_memory() -> None:
    parameters = [parameter(3), parameter(2, 2)]
    flat = flatten(parameters)
    assert [piece.numel() for piece in flat.pieces[-1]] == [4, 3, TAIL]
    for piece in flat.pieces[-1]:
        piece.fill_(1)
    assert flat.tail.tolist() == [1.0] * TAIL
    flat.hand_out(0)
    assert parameters[0].grad is not None
    assert parameters[0].grad.tolist() == [1, 1, 1]


def test_red_twin_a_gradient_packed_one_element_off_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    pack = FlatGradients.pack

    def one_off(self: FlatGradients, at: int, scale: Tensor) -> None:
        pack(self, at, scale)
        place = self._places[at]
        place.copy_(place.reshape(-1).roll(1).reshape(place.shape))

    monkeypatch.setattr(FlatGradients, "pack", one_off)
    with pytest.raises(AssertionError):
        check_round_trip(fresh(["a matrix", "half"]), scale=0.5)


def test_red_twin_a_scale_ignored_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    pack = FlatGradients.pack
    monkeypatch.setattr(FlatGradients, "pack", lambda self, at, scale: pack(self, at, ONE))
    with pytest.raises(AssertionError):
        check_round_trip(fresh(["a matrix"]), scale=0.5)


def test_red_twin_overlapping_places_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("renkei.gradients.flat._view_like", lambda each, buffer, offset: buffer[: each.numel()])
    with pytest.raises(AssertionError):
        check_round_trip([parameter(5), parameter(5)], scale=0.5)
