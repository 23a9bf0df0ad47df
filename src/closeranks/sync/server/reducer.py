"""Gradients pushed to parameter servers, weights pulled from them, in every step.

[Note: push and pull] The buckets are those of zero=1 ([Note: shards] in ``sync.reducers.sharded``), and each server
owns one slice of every bucket: workers own none. A worker sends each server its slice of a bucket as soon as backward
has filled it; the server adds what arrives, in the order of the workers' ranks, whatever order it arrives in. The
optimizer then updates the servers' slices, and each server sends its own to every other rank. Messages are point to
point, between fixed pairs of ranks in a fixed order, so none can be taken for another.

Invariants: the sum has the same bits in every run; all ranks hold the same weights after ``gather_parameters``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from closeranks.core.phases import TimedWork
from closeranks.core.protocols import ErrorFeedbackTensor, LocalParameter
from closeranks.core.traffic import count_sent
from closeranks.sync.collectives.async_reductions import AsyncReduction
from closeranks.sync.reducers.local_parameters import CommGroup
from closeranks.sync.reducers.sharded import ShardedReducer
from closeranks.sync.server.roles import Roles

_PUSH, _PULL = "data.push", "data.pull"


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


class _Messages:
    """Point-to-point messages in flight, and the tensors that they read and write."""

    def __init__(self, works: Sequence[dist.Work | None], *tensors: object) -> None:
        self._works, self._tensors = works, tensors

    def wait(self) -> None:
        for work in self._works:
            if work is not None:
                work.wait()


class PushReduction:
    """The push of one bucket: reduces it over the workers into the slice of each server."""

    num_collectives = 1

    def __init__(self, group: CommGroup, roles: Roles) -> None:
        self._group, self._roles = group, roles

    def begin_step(self, step: int) -> None: ...

    def all_reduce(self, flat: Tensor) -> AsyncReduction:
        raise NotImplementedError("servers own slices; nobody gets the whole sum")

    def reduce_scatter(self, outgoing: Tensor, arriving: Tensor) -> AsyncReduction:
        group, roles = self._group.process_group, self._roles
        if roles.server_rank(self._group.rank) is None:
            count_sent(_PUSH, outgoing.nbytes)
            slices = outgoing.view(roles.num_servers, -1)
            works = [dist.isend(s, group=group, group_dst=roles.num_workers + n) for n, s in enumerate(slices)]
            yield TimedWork(_Messages(works, outgoing), _PUSH)
            return
        pushed = arriving.new_empty(roles.num_workers, arriving.numel())
        received = [dist.irecv(row, group=group, group_src=worker) for worker, row in enumerate(pushed)]
        yield TimedWork(_Messages(received, pushed), _PUSH)
        arriving.copy_(pushed[0])
        for row in pushed[1:]:
            arriving.add_(row)

    def commit(self, taken: Tensor) -> None: ...

    def error_feedback(self) -> Iterator[ErrorFeedbackTensor]:
        return iter(())

    def compression_errors(self) -> Tensor | None:
        return None


class ServerReducer(ShardedReducer):
    """Push of gradients, pull of weights; see ``core.protocols.Reducer`` for the call sequence. ``group``: all data
    ranks, workers first."""

    def __init__(
        self,
        held: Sequence[LocalParameter],
        group: CommGroup,
        roles: Roles,
        *,
        bucket_bytes: int,
        first_bucket_bytes: int,
        overlap: bool = True,
    ) -> None:
        server = roles.server_rank(group.rank)
        self._data, self._roles, self._is_server = group, roles, server is not None
        super().__init__(
            held,
            _Owners(roles.num_servers if server is None else server, roles.num_servers),
            _Alone(),
            zero=1,
            hold="step",
            bucket_bytes=bucket_bytes,
            first_bucket_bytes=first_bucket_bytes,
            overlap=overlap,
            reduction_factory=lambda spec: PushReduction(group, roles),
        )

    def gather_parameters(self) -> None:
        """Every rank gets the slices of all servers, and waits."""
        works: list[dist.Work | None] = []
        group, first = self._data.process_group, self._roles.num_workers
        for bucket in self._buckets:
            for server, owned in enumerate(bucket.weights.view(self._roles.num_servers, -1)):
                if self._data.rank != first + server:
                    works.append(dist.irecv(owned, group=group, group_src=first + server))
                    continue
                others = [rank for rank in range(self._data.size) if rank != self._data.rank]
                count_sent(_PULL, owned.nbytes * len(others))
                works += [dist.isend(owned, group=group, group_dst=rank) for rank in others]
        TimedWork(_Messages(works), _PULL).wait()

    def _load(self, bucket: int, index: int) -> None:
        """A server has no gradients to send: what it owns of the bucket stands in for them."""
        if not self._is_server:
            super()._load(bucket, index)
            return
        own = self._buckets[bucket]
        own.outgoing = own.gradient
        own.num_lacked[index] += 1
