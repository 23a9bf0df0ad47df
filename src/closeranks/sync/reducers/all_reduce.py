"""Bucketed all-reduce of gradients over the data ranks, each of which holds the whole state (zero=0).

Each parameter's gradient is copied into its span of a flat bucket as soon as backward has produced it, and buckets are
reduced while backward runs; see [Note: bucket scheduling]. Invariants: accumulation communicates once per step, in its
last backward; a parameter that no sample used has gradient zero on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from torch import Tensor

from closeranks.core.protocols import LocalParameter, ParameterShard
from closeranks.sync.collectives.async_reductions import InFlightReductions
from closeranks.sync.collectives.flat_buffer import flat_buffer_spec
from closeranks.sync.collectives.reductions import (
    CompressibleReducer,
    FlatReduction,
    ReductionFactory,
    plain_reductions,
)
from closeranks.sync.reducers.bucket_scheduler import BucketScheduler
from closeranks.sync.reducers.buckets import GradientBucket, plan_buckets
from closeranks.sync.reducers.local_parameters import CommGroup, bucket_members, view_like
from closeranks.sync.reducers.partial_gradients import PartialGradient, sum_partial_gradients


class _Buffer:
    """One bucket's memory, a view of it for every member's gradient, and its reduction."""

    def __init__(self, bucket: GradientBucket, held: Sequence[LocalParameter], factory: ReductionFactory) -> None:
        self.held = [held[number] for number in bucket.members]
        first = self.held[0].parameter
        self.flat = torch.zeros(bucket.numel, dtype=first.dtype, device=first.device)
        pairs = zip(bucket.offsets, self.held, strict=True)
        self.views = [view_like(self.flat, offset, one.parameter) for offset, one in pairs]
        self.is_primary = bucket.is_primary
        self.reduction: FlatReduction = factory(flat_buffer_spec(self.held, bucket.offsets, self.flat))


class AllReduceReducer(CompressibleReducer):
    """Bucketed all-reduce, overlapped with backward; see ``core.protocols.Reducer`` for the call sequence.

    ``reduction_factory``: how buckets are summed, if not by torch's own all-reduce; parameters for which ``is_exact``
    holds always use torch's.
    """

    needs_equal_counts = False

    def __init__(
        self,
        held: Sequence[LocalParameter],
        group: CommGroup,
        *,
        bucket_bytes: int,
        first_bucket_bytes: int,
        overlap: bool = True,
        reduction_factory: ReductionFactory | None = None,
        is_exact: Callable[[LocalParameter], bool] = lambda one: False,
    ) -> None:
        self._held = [one for one in held if one.parameter.requires_grad]
        self._group = group
        self._parameter_shards = tuple(
            ParameterShard(one.parameter, one.piece, one.is_primary and group.rank == 0) for one in self._held
        )
        # A group of one has nothing to sum: gradients stay where autograd put them.
        members = bucket_members(self._held, is_exact=is_exact) if group.size > 1 else ()
        num_shards = 1 if reduction_factory is None else group.size  # such reductions may slice buckets
        caps = {"cap_bytes": bucket_bytes, "first_cap_bytes": first_bucket_bytes}
        self.plan = plan_buckets(members, **caps, num_shards=num_shards)
        exact = plain_reductions(group)
        kinds = [exact if reduction_factory is None or bucket.is_exact else reduction_factory for bucket in self.plan]
        self._buffers = [_Buffer(bucket, self._held, kind) for bucket, kind in zip(self.plan, kinds, strict=True)]
        self._unused: set[str] = set()
        self._in_flight = InFlightReductions()
        self._scheduler = BucketScheduler(
            self.plan,
            [one.parameter for one in self._held],
            load=self._load,
            send=self._send,
            timing="step",
            overlap=overlap,
        )

    def parameter_shards(self) -> Sequence[ParameterShard]:
        return self._parameter_shards

    def begin_step(self, step: int) -> None:
        for buffer in self._buffers:
            buffer.reduction.begin_step(step)

    def begin_backward(self, stage: int = 0, *, is_last: bool) -> None:
        self._scheduler.begin_backward(stage, is_last=is_last)

    def end_backward(self, stage: int = 0) -> None:
        self._scheduler.end_backward(stage)

    def finish(self) -> None:
        """Reduce buckets that backward did not fill, then wait. On CUDA the streams wait, not the host."""
        self._scheduler.finish()
        for one in self._held:
            if one.parameter.grad is None:  # only where there are no buckets
                one.parameter.grad = torch.zeros_like(one.parameter)
                self._unused.add(one.piece.name)
        self._in_flight.wait_all()
        sum_partial_gradients(self._parts())

    def gradients(self) -> Sequence[Tensor]:
        if self._buffers:
            return [buffer.flat for buffer in self._buffers]
        return [one.parameter.grad for one in self._held if one.parameter.grad is not None]

    def primary_gradients(self) -> Sequence[Tensor]:
        """All data ranks hold the same gradients: the first one's are the primary copy."""
        if self._group.rank != 0:
            return []
        if self._buffers:
            return [buffer.flat for buffer in self._buffers if buffer.is_primary]
        return [one.parameter.grad for one in self._held if one.is_primary and one.parameter.grad is not None]

    def unused_parameters(self) -> Collection[str]:
        return self._unused

    def gather_parameters(self) -> None:
        """Nothing to gather: every rank made the same update."""

    def release(self) -> None:
        for one in self._held:
            one.parameter.grad = None
        self._unused = set()
        self._scheduler.reset()

    def _reductions(self) -> Iterator[FlatReduction]:
        return (buffer.reduction for buffer in self._buffers)

    def _load(self, bucket: int, index: int) -> None:
        """Copy a gradient into its bucket. Costs one pass; in return micro-batches accumulate at no cost and nothing is
        copied back."""
        parameter, view = self._buffers[bucket].held[index].parameter, self._buffers[bucket].views[index]
        if parameter.grad is None:
            view.zero_()
            self._unused.add(self._buffers[bucket].held[index].piece.name)
        else:
            view.copy_(parameter.grad)
        parameter.grad = view

    def _send(self, bucket: int) -> None:
        buffer = self._buffers[bucket]
        self._in_flight.add(buffer.reduction.all_reduce(buffer.flat), buffer.reduction.num_collectives)

    def _parts(self) -> list[PartialGradient]:
        if self._buffers:
            return [
                PartialGradient(buffer.flat, groups)
                for buffer in self._buffers
                if (groups := buffer.held[0].partial_over)
            ]
        grads = ((one.parameter.grad, one.partial_over) for one in self._held)
        return [PartialGradient(gradient, groups) for gradient, groups in grads if groups and gradient is not None]
