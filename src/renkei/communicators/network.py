"""Groups of a communicator's ranks, for messages that must not meet one another."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch.distributed as dist

from renkei.communicators.channel import Channel, translate
from renkei.communicators.groups import check_reaches, create_group
from renkei.communicators.options import Options


def connect_anew(store: dist.Store, rank: int) -> dist.Store:
    """A connection of one's own to a store: a thread that waits over a connection keeps all others from it."""
    try:
        return cast(Any, store).clone()
    except RuntimeError as error:
        raise translate(error, rank=rank, doing="connecting to the job's store") from None


@dataclass(frozen=True)
class Network:
    """What a channel among some of a communicator's ranks is made from.

    Attributes:
        store: where the ranks find one another; used by one communicator alone.
        rank: this one.
        nodes: by rank, something that tells its node.
        options: the communicator's.
    """

    store: dist.Store
    rank: int
    nodes: tuple[Hashable, ...]
    options: Options
    _channels: list[Channel] = field(default_factory=list)

    def open(self, name: str, members: Sequence[int] | None = None, backend: str | None = None) -> Channel:
        """A channel among `members`, this rank one of them, or among all; they call this alike, and nobody else does.

        Args:
            name: tells it from the other channels of this communicator that have this rank as a member.
            backend: what its messages travel by; by default, as the options say.
        """
        members = range(len(self.nodes)) if members is None else members
        backend = backend or self.options.backend
        nodes = [self.nodes[member] for member in members]
        check_reaches(backend, nodes)
        rank = list(members).index(self.rank)
        group = create_group(
            dist.PrefixStore(name, self.store),
            rank=rank,
            size=len(members),
            backend=backend,
            device=self.options.device,
            address=self.options.address,
            timeout=self.options.timeout,
            num_threads=self.options.num_threads(len(set(nodes))),
            chunk=self.options.chunk_bytes,
        )
        channel = Channel(group, rank=rank, size=len(members))
        self._channels.append(channel)
        return channel

    def close(self) -> None:
        """Close all channels."""
        for channel in self._channels:
            channel.close()
