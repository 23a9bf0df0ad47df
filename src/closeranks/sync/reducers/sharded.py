"""Reduce-scatter of gradients and all-gather of weights, for sharded optimizer state (zero=1 and 2).

[Note: shards] Parameters are views of flat buckets, and each rank of the shard group owns one slice of every bucket: it
alone updates those elements. Gradients are moved into a temporary bucket and reduce-scattered into this rank's slice;
``gather_parameters`` all-gathers the updated slices into the buckets, so that the parameters hold the new values
without a copy. With the timing ``step`` whole gradients accumulate and are reduced in the last backward; with
``backward`` they are reduced and freed in each, so that a rank never holds more of them than its slices and what is in
flight.

Invariants: the parameter shards of all shard ranks cover every trainable parameter once; replicas of a shard (HSDP)
make the same update from the same bits; padding in buckets holds zeros in weights and gradients.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from torch import Tensor

from closeranks.core.phases import phase
from closeranks.core.pieces import Piece
from closeranks.core.protocols import SEVERAL_STAGES, LocalParameter, ParameterShard
from closeranks.core.traffic import count_collective
from closeranks.sync.collectives.async_reductions import AsyncReduction, InFlightReductions
from closeranks.sync.collectives.flat_buffer import flat_buffer_spec
from closeranks.sync.collectives.reductions import (
    CompressibleReducer,
    FlatReduction,
    ReductionFactory,
    plain_reductions,
)
from closeranks.sync.collectives.torch_compat import all_gather_flat
from closeranks.sync.reducers.bucket_scheduler import BucketScheduler
from closeranks.sync.reducers.buckets import GradientBucket, plan_buckets
from closeranks.sync.reducers.local_parameters import (
    CommGroup,
    bucket_members,
    dense_strides,
    row_numel,
    slowest_dim,
    view_like,
)
from closeranks.sync.reducers.partial_gradients import PartialGradient, sum_partial_gradients

ALIGN_BYTES = 64
"""Alignment of parameters in a bucket: kernels are slower on unaligned addresses, and compiled ones copy first."""
NUM_IN_FLIGHT = 2
"""Buckets in flight where gradients are freed in every backward: one is started while one completes."""


class _Bucket:
    """One bucket of weights, this rank's slice of it, and the gradients of that slice."""

    def __init__(
        self,
        bucket: GradientBucket,
        held: Sequence[LocalParameter],
        shard: CommGroup,
        over_shards: ReductionFactory,
        over_replicas: ReductionFactory,
    ) -> None:
        self.held = [held[number] for number in bucket.members]
        self.stage, self.is_primary = bucket.stage, bucket.is_primary
        self._offsets = bucket.offsets
        self._strides = [dense_strides(one.parameter) for one in self.held]
        first = self.held[0].parameter
        share = bucket.numel // shard.size
        self._first = share * shard.rank
        self.weights = torch.zeros(bucket.numel, dtype=first.dtype, device=first.device)
        self.slice = self.weights[self._first : self._first + share]
        self.gradient = torch.zeros_like(self.slice)
        self.outgoing: Tensor | None = None
        """Gradients that go into the next reduction."""
        self.num_sums = 0
        """Reductions of this step so far."""
        self.num_lacked: Counter[int] = Counter()
        """By member, in how many of this step's reductions it had no gradient."""
        self.is_summed = False
        """Whether the sum over replicas is done or in flight too."""
        self.reduction: AsyncReduction | None = None
        """The latest reduction of this step."""
        spec = flat_buffer_spec(self.held, self._offsets, self.weights)
        self.over_shards: FlatReduction = over_shards(spec)
        self.over_replicas: FlatReduction = over_replicas(spec.slice(self._first, self._first + share))
        for index, one in enumerate(self.held):
            view = self.member(self.weights, index)
            view.copy_(one.parameter.detach())
            one.parameter.data = view

    def member(self, flat: Tensor, index: int) -> Tensor:
        """A member's part of a flat tensor, with the strides of the parameter."""
        return flat.as_strided(self.held[index].parameter.shape, self._strides[index], self._offsets[index])

    def load(self, index: int) -> None:
        """Move a gradient into the outgoing buffer and clear it on the parameter."""
        if self.outgoing is None:
            self.outgoing = torch.zeros_like(self.weights)
        parameter = self.held[index].parameter
        if parameter.grad is not None:
            self.member(self.outgoing, index).copy_(parameter.grad)
            parameter.grad = None
        else:
            self.num_lacked[index] += 1

    def unused_parameters(self) -> Iterator[str]:
        """Members that had a gradient in none of this step's reductions."""
        if self.num_lacked or not self.num_sums:
            for index, one in enumerate(self.held):
                if self.num_lacked[index] == self.num_sums:
                    yield one.piece.name

    def parameter_shards(self, is_first_replica: bool) -> Iterator[tuple[ParameterShard, Tensor]]:
        """The shard and its gradient, for each member of which this rank owns a part."""
        last = self._first + self.slice.numel()
        for offset, one in zip(self._offsets, self.held, strict=True):
            begin, end = max(offset, self._first), min(offset + one.parameter.numel(), last)
            if begin < end:
                piece = _piece(one, begin - offset, end - offset)
                weights = self.slice[begin - self._first : end - self._first]
                gradient = self.gradient[begin - self._first : end - self._first]
                if piece.flat is None:
                    like = one.parameter.detach()[tuple(map(slice, piece.size))]
                    weights, gradient = view_like(weights, 0, like), view_like(gradient, 0, like)
                yield ParameterShard(weights, piece, one.is_primary and is_first_replica), gradient


def _piece(one: LocalParameter, begin: int, end: int) -> Piece:
    """Elements ``begin`` to ``end`` in memory: a range of rows, or a box where memory is not in row order."""
    row = row_numel(one.parameter)
    if row == 1:
        return one.piece.flattened(begin, end)
    return one.piece.narrow(slowest_dim(one.parameter), begin // row, end // row)


class ShardedReducer(CompressibleReducer):
    """Reduce-scatter of gradients, all-gather of weights; see ``core.protocols.Reducer`` for the call sequence.

    ``shard`` are the ranks that split the state, ``replica`` those that hold the same slices (HSDP; else a group of
    one). With zero=2, ``hold`` says which gradients a rank holds between micro-batches: their ``shards``, or all of
    them until the ``step`` is done, as with zero=1, for less traffic. ``reduction_factory``: how buckets are summed, if
    not by torch's own collective: over replicas where there are any, else over shards. Parameters for which
    ``is_exact`` holds always use torch's.
    """

    def __init__(
        self,
        held: Sequence[LocalParameter],
        shard: CommGroup,
        replica: CommGroup,
        *,
        zero: int,
        hold: str,
        bucket_bytes: int,
        first_bucket_bytes: int,
        overlap: bool = True,
        reduction_factory: ReductionFactory | None = None,
        is_exact: Callable[[LocalParameter], bool] = lambda one: False,
    ) -> None:
        trained = [one for one in held if one.parameter.requires_grad]
        self._shard, self._replica = shard, replica
        self.needs_equal_counts = zero == 2 and hold == "shards"
        self.plan = plan_buckets(
            bucket_members(trained, keep_rows=True, is_exact=is_exact),
            cap_bytes=bucket_bytes,
            first_cap_bytes=first_bucket_bytes,
            num_shards=shard.size * (1 if reduction_factory is None else replica.size),
            align_bytes=ALIGN_BYTES,
        )
        self._buckets = [self._bucket(bucket, trained, reduction_factory) for bucket in self.plan]
        shares = [share for bucket in self._buckets for share in bucket.parameter_shards(replica.rank == 0)]
        self._parameter_shards = tuple(parameter_shard for parameter_shard, _ in shares)
        self._shard_gradients = tuple(gradient for _, gradient in shares)
        self._last_of: set[int] = set()
        """Stages in their last backward of this step."""
        self._in_flight = InFlightReductions()
        self._scheduler = BucketScheduler(
            self.plan,
            [one.parameter for one in trained],
            load=self._load,
            send=lambda bucket: self._send(self._buckets[bucket]),
            timing="backward" if self.needs_equal_counts else "step",
            overlap=overlap,
        )

    def parameter_shards(self) -> Sequence[ParameterShard]:
        return self._parameter_shards

    def begin_step(self, step: int) -> None:
        for reduction in self._reductions():
            reduction.begin_step(step)

    def begin_backward(self, stage: int = 0, *, is_last: bool) -> None:
        if is_last:
            self._last_of.add(stage)
        self._scheduler.begin_backward(stage, is_last=is_last)

    def end_backward(self, stage: int = 0) -> None:
        self._scheduler.end_backward(stage)

    def finish(self) -> None:
        """Reduce buckets that backward did not fill, then wait. On CUDA the streams wait, not the host."""
        self._scheduler.finish()
        self._in_flight.wait_all()
        for bucket in self._buckets:
            if bucket.num_sums == 0:  # a step without any backward
                bucket.gradient.zero_()
            if not bucket.is_summed:
                self._in_flight.add(
                    bucket.over_replicas.all_reduce(bucket.gradient), bucket.over_replicas.num_collectives
                )
        self._in_flight.wait_all()
        sum_partial_gradients(
            [PartialGradient(b.gradient, groups) for b in self._buckets if (groups := b.held[0].partial_over)]
        )
        for parameter_shard, gradient in zip(self._parameter_shards, self._shard_gradients, strict=True):
            parameter_shard.tensor.grad = gradient

    def gradients(self) -> Sequence[Tensor]:
        return [bucket.gradient for bucket in self._buckets]

    def primary_gradients(self) -> Sequence[Tensor]:
        """Each shard rank of the first replica holds the primary copy of its slices."""
        return [bucket.gradient for bucket in self._buckets if bucket.is_primary and self._replica.rank == 0]

    def unused_parameters(self) -> Collection[str]:
        return {name for bucket in self._buckets for name in bucket.unused_parameters()}

    def gather_parameters(self) -> None:
        """All-gather the slices of all shard ranks into the buckets that the parameters are views of, and wait.

        Any code may read a parameter after this (a checkpoint, another module of a tied pair), so nothing is left in
        flight.
        """
        if self._shard.size == 1:
            return
        group = self._shard.process_group
        for bucket in self._buckets:
            count_collective("data", "all-gather", self._shard.size, bucket.weights)
        works = [all_gather_flat(b.weights, b.slice, group=group, async_op=True) for b in self._buckets]
        with phase("data.all_gather"):
            for work in works:
                work.wait()

    def release(self) -> None:
        for parameter_shard in self._parameter_shards:
            parameter_shard.tensor.grad = None
        for bucket in self._buckets:
            bucket.num_sums, bucket.is_summed, bucket.reduction = 0, False, None
            bucket.num_lacked.clear()
            for one in bucket.held:
                one.parameter.grad = None
        self._last_of.clear()
        self._scheduler.reset()

    def _reductions(self) -> Iterator[FlatReduction]:
        for bucket in self._buckets:
            yield bucket.over_shards
            yield bucket.over_replicas

    def _bucket(
        self, bucket: GradientBucket, held: Sequence[LocalParameter], factory: ReductionFactory | None
    ) -> _Bucket:
        over_shards, over_replicas = plain_reductions(self._shard), plain_reductions(self._replica)
        if factory is not None and not bucket.is_exact:
            over_shards, over_replicas = (over_shards, factory) if self._replica.size > 1 else (factory, over_replicas)
        return _Bucket(bucket, held, self._shard, over_shards, over_replicas)

    def _load(self, bucket: int, index: int) -> None:
        self._buckets[bucket].load(index)

    def _send(self, bucket: _Bucket) -> None:
        outgoing, bucket.outgoing = bucket.outgoing, None
        assert outgoing is not None
        is_first = bucket.num_sums == 0
        is_last = not self.needs_equal_counts or bucket.stage in self._last_of or bucket.stage == SEVERAL_STAGES
        bucket.num_sums += 1
        num_collectives = bucket.over_shards.num_collectives
        if is_last and self._replica.size > 1:
            num_collectives += bucket.over_replicas.num_collectives
        if bucket.reduction is not None and bucket.over_shards.num_collectives > 1:
            # At its end it writes the error feedback that the next one reads.
            self._in_flight.wait_for(bucket.reduction)
        bucket.reduction = _bucket_reduction(bucket, outgoing, is_first=is_first, is_last=is_last)
        self._in_flight.add(bucket.reduction, num_collectives)
        if self.needs_equal_counts:
            self._in_flight.wait_until(NUM_IN_FLIGHT)


def _bucket_reduction(bucket: _Bucket, outgoing: Tensor, *, is_first: bool, is_last: bool) -> AsyncReduction:
    """Reduce over the shards into this rank's slice, and after the last reduction of the step over replicas."""
    arriving = bucket.gradient if is_first else torch.empty_like(bucket.gradient)
    yield from bucket.over_shards.reduce_scatter(outgoing, arriving)
    if not is_first:
        bucket.gradient.add_(arriving)
    if is_last:
        bucket.is_summed = True
        yield from bucket.over_replicas.all_reduce(bucket.gradient)
