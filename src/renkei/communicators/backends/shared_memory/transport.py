"""Collectives of the ranks of one host, who read and write one another's memory."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from renkei.communicators.backends.flattening import num_bytes
from renkei.communicators.backends.shared_memory.calls import NOTE_SIZE, Call, Note, check_same_call
from renkei.communicators.backends.shared_memory.mail import Mail
from renkei.communicators.backends.shared_memory.meeting import Meeting
from renkei.communicators.backends.shared_memory.memory import PRIVATE, Memory, Place
from renkei.communicators.backends.shared_memory.mesh import Mesh
from renkei.communicators.backends.transport import Transport
from renkei.communicators.computable import as_signed, check_defined, halves, swap_order
from renkei.communicators.reduction import CHUNK, Reduction, reduce_in_chunks, reduce_to
from renkei.communicators.summation import slices
from renkei.communicators.work_queue import Transfer
from renkei.errors import MismatchError

BANKS = 2**23  # bytes that all ranks together exchange at a time; they fit into the cache that processors share
SMALL = 2**16  # bytes up to which every rank adds a whole tensor itself, which takes one meeting instead of two

_COUNT = 64  # bytes for a rank's count of meetings: a cache line of its own


class SharedMemoryTransport(Transport):
    """Each rank has a part of a shared file: notes in which it says what it calls, and two banks others read from.

    A rank writes to its two notes and banks by turns. When it comes to write to one again, all ranks have met since it
    wrote to the other, so all have finished reading this one: one meeting for each turn is enough.
    """

    name = "shared_memory"
    has_slices = True

    def __init__(self, store: dist.Store, *, rank: int, size: int, timeout: float, chunk: int = CHUNK) -> None:
        self.rank, self.size, self.timeout = rank, size, timeout
        self._chunk = chunk
        self._mesh = Mesh(store, rank=rank, size=size, timeout=timeout)
        with contextlib.ExitStack() as undo:  # what was opened, should the rest fail
            undo.callback(self._mesh.close)
            self._meeting = Meeting(self._mesh, timeout)
            undo.callback(self._meeting.close)
            self._mail = Mail(self._mesh)
            undo.callback(self._mail.close)
            self._share_memory()
            undo.pop_all()

    def _share_memory(self) -> None:
        size = self.size
        self._memory = Memory(self._mesh)
        self._bank = max(1, BANKS // size // 2**12) * 2**12
        self._lay_out(self._memory.make(_COUNT + 2 * (NOTE_SIZE + 16 * size + self._bank)).parts)
        self._lane = self._bank // size // 64 * 64  # a rank's part of a bank, in bytes
        self._views: dict[tuple[int, torch.dtype], list[Tensor]] = {}
        self._turn = 0
        self._meeting.wait("setting up shared memory")

    def _lay_out(self, parts: Sequence[Tensor]) -> None:
        """Give each rank's part its places: a count of meetings, and two of each note, table of sizes and bank."""
        sizes = [_COUNT, *[NOTE_SIZE, 16 * self.size, self._bank] * 2]
        by_rank = [part[: sum(sizes)].split(sizes) for part in parts]
        counts, *places = zip(*by_rank, strict=True)
        self._meeting.count_in([count[:8].view(torch.int64) for count in counts])
        self._all_notes = [[note.numpy().data for note in places[3 * turn]] for turn in (0, 1)]
        self._notes = [notes[self.rank] for notes in self._all_notes]
        self._tables = [[table.view(torch.int64) for table in places[3 * turn + 1]] for turn in (0, 1)]
        self._banks = [list(places[3 * turn + 2]) for turn in (0, 1)]

    # -- reductions -----------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor, reduction: Reduction) -> None:
        check_defined(tensor.dtype, reduction)
        swap_order(tensor, reduction)
        self._all_reduce(as_signed(halves(tensor)), reduction)
        swap_order(tensor, reduction)

    def _all_reduce(self, tensor: Tensor, reduction: Reduction) -> None:
        call = Call("all_reduce", reduction, str(tensor.dtype)[6:], num_bytes(tensor))
        if call.num_bytes <= SMALL:
            banks = self._typed_banks(tensor.dtype, tensor.numel())
            banks[self.rank].copy_(tensor)
            self._meet(call)
            reduce_to(tensor, banks, reduction)
            return
        place = self._memory.place(tensor)
        if self._meet(call, place):
            own = [slices(each, self.size)[self.rank] for each in self._memory.everyones(place, tensor)]
            reduce_in_chunks(own, own, reduction, self._chunk)
            self._meeting.wait("all_reduce")
        else:
            self._all_reduce_by_banks(tensor, reduction)

    def _all_reduce_by_banks(self, tensor: Tensor, reduction: Reduction) -> None:
        """Exchange a bank's worth after the other: each rank puts out the others' slices, and then the sum of its own.

        While one piece is being added the next is put out, in the other bank, so one meeting for each piece is enough.
        """
        pieces = tensor.split(self.size * self._lane // tensor.element_size())
        pieces = [slices(piece, self.size) for piece in pieces]
        banks = self._put_out(pieces[0])
        before = None
        for piece, following in zip(pieces, (*pieces[1:], None), strict=True):
            self._meeting.wait("all_reduce")
            if before is not None:
                self._take_in(*before)
            mine = [bank[self.rank] for bank in banks]
            parts = [*mine[: self.rank], piece[self.rank], *mine[self.rank + 1 :]]
            reduce_in_chunks(parts, [piece[self.rank], mine[self.rank]], reduction, self._chunk)
            before = piece, banks
            if following is not None:
                banks = self._put_out(following)
        self._meeting.wait("all_reduce")
        self._take_in(piece, banks)

    def _put_out(self, piece: Sequence[Tensor]) -> list[list[Tensor]]:
        """Copy the other ranks' slices to this rank's bank; returns, by rank, the slices of theirs."""
        # Lanes stay where they are for a shorter piece, too: a rank's own may still be read while it fills the others.
        lanes = [bank.split(self._lane)[: self.size] for bank in self._banks[self._turn]]
        banks = [
            [lane[: num_bytes(own)].view(own.dtype) for lane, own in zip(each, piece, strict=True)] for each in lanes
        ]
        for other, own in enumerate(piece):
            if other != self.rank:
                banks[self.rank][other].copy_(own)
        self._turn = 1 - self._turn
        return banks

    def _take_in(self, piece: Sequence[Tensor], banks: Sequence[Sequence[Tensor]]) -> None:
        """Copy the other ranks' sums."""
        for other, own in enumerate(piece):
            if other != self.rank:
                own.copy_(banks[other][other])

    def reduce_scatter(self, output: Tensor, tensor: Tensor, reduction: Reduction) -> None:
        check_defined(tensor.dtype, reduction)
        tensor = tensor.clone()
        swap_order(tensor, reduction)
        own, mine = as_signed(halves(tensor)), as_signed(halves(output))
        self._meet(Call("reduce_scatter", reduction, str(tensor.dtype)[6:], num_bytes(tensor)))
        self._reduce_by_banks(list(own.view(self.size, -1)), mine, reduction)
        swap_order(output, reduction)

    def _reduce_by_banks(self, pieces: Sequence[Tensor], mine: Tensor, reduction: Reduction) -> None:
        """Fill `mine`, if this rank has one, with the reduction over ranks of their piece of its number."""
        lane = self._bank // len(pieces) // mine.element_size() or 1
        for begin in range(0, pieces[0].numel(), lane):
            parts = [piece[begin : begin + lane] for piece in pieces]
            numel = parts[0].numel()
            lanes = [bank.view(len(pieces), -1) for bank in self._typed_banks(mine.dtype, len(pieces) * numel)]
            for part, place in zip(parts, lanes[self.rank], strict=True):
                place[: part.numel()].copy_(part)
            self._end_turn("reduce_scatter")
            if self.rank < len(pieces):
                result = mine[begin : begin + lane]
                reduce_to(result, [each[self.rank][: result.numel()] for each in lanes], reduction)

    def reduce_slices(self, tensor: Tensor, num_slices: int) -> None:
        place = self._memory.place(tensor)
        call = Call("reduce_slices", "sum", str(tensor.dtype)[6:], num_bytes(tensor), num_slices)
        is_shared = self._meet(call, place)
        pieces = slices(tensor, num_slices)
        mine = pieces[self.rank] if self.rank < num_slices else tensor[:0]
        if not is_shared:
            self._reduce_by_banks(pieces, mine, "sum")
            return
        if mine.numel():
            parts = [slices(each, num_slices)[self.rank] for each in self._memory.everyones(place, tensor)]
            reduce_in_chunks(parts, [mine], "sum", self._chunk)
        self._meeting.wait("reduce_slices")

    def gather_slices(self, tensor: Tensor, num_slices: int) -> None:
        place = self._memory.place(tensor)
        call = Call("gather_slices", "", str(tensor.dtype)[6:], num_bytes(tensor), num_slices)
        is_shared = self._meet(call, place)
        pieces = slices(tensor, num_slices)
        if is_shared:
            everyones = self._memory.everyones(place, tensor)
            for other, piece in enumerate(pieces):
                if other != self.rank:
                    piece.copy_(slices(everyones[other], num_slices)[other])
            self._meeting.wait("gather_slices")
            return
        length = self._bank // tensor.element_size()
        for begin in range(0, pieces[0].numel(), length):
            banks = self._typed_banks(tensor.dtype, length)
            for other, piece in enumerate(pieces):
                if other == self.rank:
                    part = piece[begin : begin + length]
                    banks[other][: part.numel()].copy_(part)
            self._end_turn("gather_slices")
            for other, piece in enumerate(pieces):
                if other != self.rank:
                    part = piece[begin : begin + length]
                    part.copy_(banks[other][: part.numel()])

    # -- movement -------------------------------------------------------------------------------------------------

    def broadcast(self, data: Tensor, root: int) -> None:
        self._meet(Call("broadcast", num_bytes=data.numel(), root=root))
        for piece in data.split(self._bank):
            bank = self._banks[self._turn][root][: piece.numel()]
            if self.rank == root:
                bank.copy_(piece)
            self._end_turn("broadcast")
            if self.rank != root:
                piece.copy_(bank)

    def all_gather(self, output: Tensor, data: Tensor) -> None:
        self._gather("all_gather", output, data, 0)

    def gather(self, output: Tensor | None, data: Tensor, root: int) -> None:
        self._gather("gather", output, data, root)

    def _gather(self, operation: str, output: Tensor | None, data: Tensor, root: int) -> None:
        self._meet(Call(operation, num_bytes=data.numel(), root=root))
        rows = None if output is None else output.view(self.size, -1)
        for begin in range(0, data.numel(), self._bank):
            piece = data[begin : begin + self._bank]
            banks = self._banks[self._turn]
            banks[self.rank][: piece.numel()].copy_(piece)
            self._end_turn(operation)
            for row, bank in zip(rows if rows is not None else (), banks, strict=rows is not None):
                row[begin : begin + self._bank].copy_(bank[: piece.numel()])

    def scatter(self, output: Tensor, data: Tensor | None, root: int) -> None:
        self._meet(Call("scatter", num_bytes=output.numel(), root=root))
        lane = self._bank // self.size
        for begin in range(0, output.numel(), lane):
            piece = output[begin : begin + lane]
            lanes = self._banks[self._turn][root][: self.size * piece.numel()].view(self.size, -1)
            if data is not None:
                lanes.copy_(data.view(self.size, -1)[:, begin : begin + lane])
            self._end_turn("scatter")
            piece.copy_(lanes[self.rank])

    def all_to_all(self, output: Tensor, data: Tensor, recv_sizes: Sequence[int], send_sizes: Sequence[int]) -> None:
        tables = self._tables[self._turn]
        tables[self.rank].copy_(torch.tensor([*send_sizes, *recv_sizes], device="cpu"))
        self._meet(Call("all_to_all"))
        sent, received = torch.stack(tables).view(self.size, 2, self.size).unbind(1)
        misfits = (sent != received.T).nonzero().tolist()
        if misfits:
            source, dest = misfits[0]
            raise MismatchError(
                f"rank {source} sends {sent[source, dest]} bytes to rank {dest}, which expects {received[dest, source]}"
            )
        lane = self._bank // self.size
        for begin in range(0, int(sent.max()), lane):
            banks = [bank.view(-1)[: lane * self.size].view(self.size, lane) for bank in self._banks[self._turn]]
            for piece, place in zip(data.split(list(send_sizes)), banks[self.rank], strict=True):
                part = piece[begin : begin + lane]
                place[: part.numel()].copy_(part)
            self._end_turn("all_to_all")
            for piece, bank in zip(output.split(list(recv_sizes)), banks, strict=True):
                part = piece[begin : begin + lane]
                part.copy_(bank[self.rank][: part.numel()])

    def barrier(self) -> None:
        self._meet(Call("barrier"))

    # -- from one rank to another ---------------------------------------------------------------------------------

    def send(self, data: Tensor, dest: int, tag: int) -> Transfer:
        return self._mail.send(data, dest, tag)

    def recv(self, data: Tensor, source: int | None, tag: int) -> Transfer:
        return self._mail.recv(data, source, tag)

    # -- memory ---------------------------------------------------------------------------------------------------

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A tensor of zeros that `all_reduce` adds in place. All ranks allocate the same in the same order."""
        self._meet(Call("allocate", "", str(dtype)[6:], numel))
        return self._memory.allocate(numel, dtype)

    def interrupt(self) -> None:
        self._mail.interrupt()
        self._mesh.interrupt()

    def close(self) -> None:
        self._mail.close()
        self._meeting.close()
        self._mesh.close()

    # -- turns ----------------------------------------------------------------------------------------------------

    def _meet(self, call: Call, place: Place = PRIVATE) -> bool:
        """Meet all ranks, who must call the same; tells whether their tensors lie at the same shared place."""
        turn, mine = self._turn, Note(call, place).pack()
        self._notes[turn][:] = mine
        self._end_turn(call.operation)
        notes = self._all_notes[turn]
        if all(note == mine for note in notes):
            return place.segment != 0
        check_same_call([Note.unpack(bytes(note)) for note in notes])
        return False

    def _end_turn(self, doing: str) -> None:
        self._meeting.wait(doing)
        self._turn = 1 - self._turn

    def _typed_banks(self, dtype: torch.dtype, numel: int) -> list[Tensor]:
        """By rank, the first elements of the bank of this turn."""
        key = self._turn, dtype
        if key not in self._views:  # kept, for making them takes longer than adding a few numbers does
            whole = self._bank // dtype.itemsize * dtype.itemsize
            self._views[key] = [bank[:whole].view(dtype) for bank in self._banks[self._turn]]
        return [view[:numel] for view in self._views[key]]
