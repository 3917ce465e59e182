"""Collectives on tensors: any shape, any dtype, an argument never changed, a mistake an error on every rank.

What only moves is moved as bytes, so every dtype can travel. What is computed is computed in a dtype the backends
have and that loses nothing on the way: 16-bit floats are added in 32 bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import Tensor

from renkei.communicators.channel import OWN_TAG, Channel
from renkei.communicators.headers import REDUCTIONS, problem_with
from renkei.communicators.reduction import Reduction

CPU = torch.device("cpu")  # said where it is meant: a script may have set another default
CHUNK = 2**30  # bytes of one message: MPI counts in 32-bit integers, and nothing is gained by more

_CARRIERS = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.bool: torch.int32,
    torch.int8: torch.int32,
    torch.uint8: torch.int32,
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.uint64: torch.int64,
    torch.complex32: torch.float32,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}
_AS_THEY_ARE = (torch.float32, torch.float64, torch.int32, torch.int64)


def all_reduce(channel: Channel, tensor: Tensor, reduction: str) -> Tensor:
    """The sum, mean, product, max or min over ranks, on every rank."""
    problem = problem_with([tensor]) or _check_reduction([tensor], reduction, REDUCTIONS)
    channel.agree("all_reduce", [tensor], reduction=reduction, same_tensors=True, problem=problem)
    carrier = _to_carrier(tensor)
    native = cast(Reduction, "sum" if reduction == "mean" else reduction)
    channel.start_reduction(carrier, native, "all_reduce").wait()
    return _from_carrier(carrier, tensor, mean_over=channel.size if reduction == "mean" else 1)


def reduce_scatter(channel: Channel, tensors: Sequence[Tensor], reduction: str) -> Tensor:
    """Rank r gets the sum or mean over ranks of their ``tensors[r]``, added in the order of ranks."""
    problem = _check_one_for_each_rank(channel, tensors) or _check_reduction(tensors, reduction, ["sum", "mean"])
    channel.agree("reduce_scatter", tensors, reduction=reduction, same_tensors=True, problem=problem)
    mine = tensors[channel.rank]
    carriers = torch.cat([_to_carrier(tensor) for tensor in tensors])
    parts_per_element = 2 if mine.is_complex() else 1
    send_sizes = [tensor.numel() * parts_per_element for tensor in tensors]
    recv_sizes = [send_sizes[channel.rank]] * channel.size
    parts = channel.all_to_all_split(carriers, send_sizes, recv_sizes, "reduce_scatter")
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return _from_carrier(total, mine, mean_over=channel.size if reduction == "mean" else 1)


def broadcast(channel: Channel, tensor: Tensor | None, root: int, device: torch.device) -> Tensor:
    """The root's tensor, on every rank; what the others pass is not looked at."""
    problem = check_root(channel, root)
    if problem is None and channel.rank == root:
        problem = problem_with([tensor])
    mine = tensor if channel.rank == root else None
    header = channel.agree("broadcast", None if mine is None else [mine], root=root, problem=problem)[root]
    assert header.dtype is not None
    shape = torch.tensor([0] * header.ndim if mine is None else mine.shape, dtype=torch.int64, device=CPU)
    if header.ndim:
        channel.start_broadcast(shape, root, "broadcast's shape").wait()
    if mine is None:
        result = torch.empty(shape.tolist(), dtype=header.dtype, device=device)
    else:
        result = mine.detach().to(device, copy=True, memory_format=torch.contiguous_format)
    broadcast_bytes(channel, as_bytes(result), root, "broadcast")
    return result


def broadcast_into(channel: Channel, tensors: Sequence[Tensor], root: int) -> None:
    """Give `tensors` the values they have on `root`; many travel in one message."""
    channel.agree("broadcast_into", tensors, root=root, same_tensors=True, problem=check_root(channel, root))
    for group in _messages(tensors):
        data = torch.cat([as_bytes(tensor) for tensor in group])
        broadcast_bytes(channel, data, root, "broadcast_into")
        if channel.rank != root:
            sizes = [tensor.numel() * tensor.element_size() for tensor in group]
            for tensor, part in zip(group, data.split(sizes), strict=True):
                tensor.detach().copy_(_from_bytes(part, tensor.dtype, tensor.shape))


def all_gather(channel: Channel, tensor: Tensor) -> tuple[Tensor, ...]:
    """Every rank's tensor, on every rank; shapes may differ."""
    headers = channel.agree("all_gather", [tensor], same_dtype=True)
    shapes = _all_gather_shapes(channel, tensor, max(header.ndim for header in headers))
    sizes = [header.numel * tensor.element_size() for header in headers]
    gathered = all_gather_bytes(channel, as_bytes(tensor), sizes, "all_gather")
    return tuple(_from_bytes(data, tensor.dtype, shape) for data, shape in zip(gathered, shapes, strict=True))


def gather(channel: Channel, tensor: Tensor, root: int) -> tuple[Tensor, ...] | None:
    """Every rank's tensor on `root`, None elsewhere; shapes may differ."""
    headers = channel.agree("gather", [tensor], root=root, same_dtype=True, problem=check_root(channel, root))
    shapes = _all_gather_shapes(channel, tensor, max(header.ndim for header in headers))
    if channel.rank != root:
        if tensor.numel():
            channel.start_send(as_bytes(tensor), root, OWN_TAG, "gather").wait()
        return None
    results = [
        tensor.detach().clone() if rank == root else tensor.new_empty(shape) for rank, shape in enumerate(shapes)
    ]
    pending = [
        channel.start_recv(as_bytes(result), rank, OWN_TAG, f"gather from rank {rank}")
        for rank, result in enumerate(results)
        if rank != root and result.numel()
    ]
    for each in pending:
        each.wait()
    return tuple(results)


def scatter(channel: Channel, tensors: Sequence[Tensor] | None, root: int, device: torch.device) -> Tensor:
    """Rank r gets the root's ``tensors[r]``; shapes may differ; what the others pass is not looked at."""
    problem = check_root(channel, root)
    if problem is None and channel.rank == root:
        problem = _check_one_for_each_rank(channel, tensors)
    mine = tensors if channel.rank == root else None
    headers = channel.agree("scatter", mine, root=root, problem=problem)
    dtype, ndim = headers[root].dtype, headers[root].ndim
    assert dtype is not None
    described = torch.zeros(channel.size, 1 + ndim, dtype=torch.int64, device=CPU)
    if mine is not None:
        mine = [tensor.to(device) for tensor in mine]
        for row, tensor in zip(described, mine, strict=True):
            _describe(tensor, row)
    channel.start_broadcast(described, root, "scatter's shapes").wait()
    if mine is not None:
        pending = [
            channel.start_send(as_bytes(tensor), rank, OWN_TAG, f"scatter to rank {rank}")
            for rank, tensor in enumerate(mine)
            if rank != root and tensor.numel()
        ]
        for each in pending:
            each.wait()
        return mine[root].detach().clone()
    result = torch.empty(_shape_of(described[channel.rank]), dtype=dtype, device=device)
    if result.numel():
        channel.start_recv(as_bytes(result), root, OWN_TAG, "scatter").wait()
    return result


def all_to_all(channel: Channel, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Rank r's result holds, from each rank, what that rank has at ``tensors[r]``; shapes may differ."""
    problem = _check_one_for_each_rank(channel, tensors)
    headers = channel.agree("all_to_all", tensors, same_dtype=True, problem=problem)
    ndim = max(header.ndim for header in headers)
    described = torch.zeros(channel.size, 1 + ndim, dtype=torch.int64, device=CPU)
    for row, tensor in zip(described, tensors, strict=True):
        _describe(tensor, row)
    row_sizes = [1 + ndim] * channel.size
    rows = channel.all_to_all_split(described.reshape(-1), row_sizes, row_sizes, "all_to_all's shapes")
    shapes = [_shape_of(row) for row in rows]
    dtype, itemsize = tensors[0].dtype, tensors[0].element_size()
    sent = torch.cat([as_bytes(tensor) for tensor in tensors])
    send_sizes = [tensor.numel() * itemsize for tensor in tensors]
    recv_sizes = [shape.numel() * itemsize for shape in shapes]
    received = channel.all_to_all_split(sent, send_sizes, recv_sizes, "all_to_all")
    return tuple(_from_bytes(data, dtype, shape) for data, shape in zip(received, shapes, strict=True))


# -- bytes --------------------------------------------------------------------------------------------------------


def as_bytes(tensor: Tensor) -> Tensor:
    """The tensor's elements as a flat tensor of bytes; the same memory if it is contiguous."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return (flat if flat.numel() else flat.new_empty(0)).view(torch.uint8)  # NumPy's empty arrays have a stride of 0


def broadcast_bytes(channel: Channel, data: Tensor, root: int, doing: str, chunk: int = CHUNK) -> None:
    """Fill `data` with the root's, which has the same length."""
    if channel.size > 1:
        for piece in data.split(chunk):
            if piece.numel():
                channel.start_broadcast(piece, root, doing).wait()


def all_gather_bytes(
    channel: Channel, data: Tensor, sizes: Sequence[int], doing: str, chunk: int = CHUNK
) -> list[Tensor]:
    """Every rank's bytes, `sizes[r]` of them from rank r."""
    if len(set(sizes)) == 1 and sizes[0] <= chunk:
        return channel.all_gather_equal(data, doing)
    results = [data.clone() if rank == channel.rank else data.new_empty(size) for rank, size in enumerate(sizes)]
    for rank, result in enumerate(results):
        broadcast_bytes(channel, result, rank, f"{doing} from rank {rank}", chunk)
    return results


def _messages(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Cut a list into runs of one device and at most `CHUNK` bytes, or of one tensor."""
    run: list[Tensor] = []
    length = 0
    for tensor in tensors:
        nbytes = tensor.numel() * tensor.element_size()
        if run and (tensor.device != run[0].device or length + nbytes > CHUNK):
            yield run
            run, length = [], 0
        run.append(tensor)
        length += nbytes
    if run:
        yield run


def _from_bytes(data: Tensor, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    if data.storage_offset() % dtype.itemsize:
        data = data.clone()
    return data.view(dtype).view(shape)


# -- arithmetic ---------------------------------------------------------------------------------------------------


def _to_carrier(tensor: Tensor) -> Tensor:
    """A flat copy in a dtype in which reductions are exact enough and every backend has them."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    dtype = _CARRIERS.get(tensor.dtype, tensor.dtype)
    return tensor.to(dtype, copy=True, memory_format=torch.contiguous_format).reshape(-1)


def _from_carrier(carrier: Tensor, like: Tensor, *, mean_over: int) -> Tensor:
    if mean_over > 1:
        carrier = carrier / mean_over
    if like.is_complex():
        return torch.view_as_complex(carrier.view(*like.shape, 2)).to(like.dtype)
    if like.dtype == torch.bool:
        carrier = carrier != 0
    return carrier.to(like.dtype).view(like.shape)


# -- arguments and shapes -----------------------------------------------------------------------------------------


def _check_reduction(tensors: Sequence[Tensor], reduction: str, known: Sequence[str]) -> str | None:
    """What is wrong with a reduction of such tensors, if anything."""
    if reduction not in known:
        return f"reduction is {reduction!r}, but must be one of {', '.join(known)}"
    dtype = tensors[0].dtype
    if dtype not in _CARRIERS and dtype not in _AS_THEY_ARE:
        return f"torch has no {reduction} for {dtype}"
    if reduction == "mean" and not (dtype.is_floating_point or dtype.is_complex):
        return f"the mean of {dtype} isn't one of {dtype}; convert to a floating dtype first"
    if dtype.is_complex and reduction not in ("sum", "mean"):
        return f"{reduction} of complex numbers isn't computed element by element; only sum and mean are"
    if dtype == torch.uint64 and reduction in ("max", "min"):  # carried as int64, whose sums are the same bits
        return f"torch has no {reduction} for {dtype}"
    return None


def check_root(channel: Channel, root: int) -> str | None:
    """What is wrong with `root`, if anything."""
    return None if 0 <= root < channel.size else f"root is {root}, but ranks go from 0 to {channel.size - 1}"


def _check_one_for_each_rank(channel: Channel, tensors: Sequence[Tensor] | None) -> str | None:
    if tensors is None or len(tensors) != channel.size:
        count = "none" if tensors is None else len(tensors)
        return f"needs one tensor for each of the {channel.size} ranks, but got {count}"
    if problem := problem_with(tensors):
        return problem
    kinds = {f"{tensor.dtype} on {tensor.device}" for tensor in tensors}
    return None if len(kinds) == 1 else f"tensors must share one dtype and device, but have {', '.join(sorted(kinds))}"


def _describe(tensor: Tensor, row: Tensor) -> None:
    row[0] = tensor.dim()
    row[1 : 1 + tensor.dim()] = torch.tensor(tensor.shape, dtype=torch.int64, device=CPU)


def _shape_of(row: Tensor) -> torch.Size:
    ndim, *shape = row.tolist()
    return torch.Size(shape[:ndim])


def _all_gather_shapes(channel: Channel, tensor: Tensor, ndim: int) -> list[torch.Size]:
    row = torch.zeros(1 + ndim, dtype=torch.int64, device=CPU)
    _describe(tensor, row)
    return [_shape_of(each) for each in channel.all_gather_equal(row, "exchange of shapes")]
