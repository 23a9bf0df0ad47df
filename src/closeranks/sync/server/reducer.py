"""Gradients pushed to parameter servers, weights pulled from them, in every step.

[Note: push and pull] The buckets are those of zero=1 ([Note: shards] in ``sync.reducers.sharded``), and each server
owns one slice of every bucket: workers own none. A worker sends each server its slice of a bucket as soon as backward
has filled it, and the server adds what arrives. The optimizer then updates the servers' slices, and each server sends
its own to every other rank.

Invariants: the sum has the same bits in every run; all ranks hold the same weights after ``gather_parameters``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from closeranks.core.phases import PendingWork, TimedWork
from closeranks.core.protocols import LocalParameter
from closeranks.core.traffic import count_sent
from closeranks.sync.collectives.flat_buffer import FlatBufferSpec
from closeranks.sync.reducers.local_parameters import CommGroup
from closeranks.sync.reducers.sharded import ShardedReducer
from closeranks.sync.server.compressed_push import CompressedPush, PushCompression
from closeranks.sync.server.messages import Messages, bucket_tag, receive, send
from closeranks.sync.server.push import LastStep, PushReduction
from closeranks.sync.server.roles import Roles

PULL_PHASE = "data.pull"


@dataclass(frozen=True, slots=True)
class _Owners:
    """The servers as the group that splits the state. A worker is one past its last rank, and so owns nothing."""

    rank: int
    size: int
    process_group: dist.ProcessGroup | None = None


@dataclass(frozen=True, slots=True)
class _Alone:
    """There are no replicas of a slice."""

    rank: int = 0
    size: int = 1
    process_group: dist.ProcessGroup | None = None


class ServerReducer(ShardedReducer):
    """Synchronous: every step pushes and pulls. See ``core.protocols.Reducer`` for the call sequence.

    ``group``: all data ranks, workers first; ``bound``: how many steps a worker may be ahead of the servers;
    ``compression``: of what workers push."""

    push_kind = PushReduction

    def __init__(
        self,
        held: Sequence[LocalParameter],
        group: CommGroup,
        roles: Roles,
        *,
        bucket_bytes: int,
        first_bucket_bytes: int,
        overlap: bool = True,
        bound: int = 0,
        last_step: LastStep = lambda step: step,
        compression: PushCompression | None = None,
    ) -> None:
        self._data, self._roles = group, roles
        self._server = roles.server_rank(group.rank)
        self._pushes: list[PushReduction] = []

        def make_push(spec: FlatBufferSpec) -> PushReduction:
            given = (spec, group, roles, bucket_tag(len(self._pushes)), bound, last_step)
            push = CompressedPush(*given, compression=compression) if compression else self.push_kind(*given)
            self._pushes.append(push)
            return push

        super().__init__(
            held,
            _Owners(roles.num_servers if self._server is None else self._server, roles.num_servers),
            _Alone(),
            zero=1,
            hold="step",
            bucket_bytes=bucket_bytes,
            first_bucket_bytes=first_bucket_bytes,
            overlap=overlap,
            reduction_factory=make_push,
        )

    def gather_parameters(self) -> None:
        """Every rank gets the slices of all servers, and waits."""
        works: list[PendingWork] = []
        for number in range(self._roles.num_servers):
            works += self._slices_of(number).works if number != self._server else self._send_to(self._others()).works
        TimedWork(Messages(works), PULL_PHASE).wait()

    def _others(self) -> list[int]:
        """All ranks but this one."""
        return [rank for rank in range(self._data.size) if rank != self._data.rank]

    def _send_to(self, ranks: Sequence[int], *, copies: bool = False) -> Messages:
        """Send this server's slices; ``copies``: as they are now, whatever is changed before they are transmitted."""
        slices = [bucket.slice.clone() if copies else bucket.slice for bucket in self._buckets]
        count_sent(PULL_PHASE, sum(one.nbytes for one in slices) * len(ranks))
        works = [work for tag, one in enumerate(slices) for work in send(one, self._data, ranks, bucket_tag(tag))]
        return Messages(works, slices)

    def _slices_of(self, server: int, weights: Sequence[Tensor] = ()) -> Messages:
        """Ask for the next version of a server's slices, into ``weights`` or the buckets themselves."""
        flats = weights or [bucket.weights for bucket in self._buckets]
        slices = [flat.view(self._roles.num_servers, -1)[server] for flat in flats]
        rank = self._roles.num_workers + server
        works = [receive(one, self._data, rank, bucket_tag(tag)) for tag, one in enumerate(slices)]
        return Messages(works, slices)

    def _load(self, bucket: int, index: int) -> None:
        """A server has no gradients to send: what it owns of the bucket stands in for them."""
        if self._server is None:
            super()._load(bucket, index)
            return
        own = self._buckets[bucket]
        own.outgoing = own.gradient
        own.num_lacked[index] += 1
