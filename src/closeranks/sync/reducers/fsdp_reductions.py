"""Replaces the collectives that reduce the gradients of FSDP2's units, for instance by compressed ones.

[Note: unit buffers] FSDP2 lays a unit's gradients out rank by rank: for each rank its rows of every parameter, padded
to equal counts, one after the other. ``FsdpReduceScatter`` is called with that buffer in place of torch's
reduce-scatter, and ``FsdpAllReduceHook`` with the result, this rank's rows, to sum them over replicas. FSDP2 would sum
over replicas by itself, and only then call a hook; so it is given the shard axis alone, and the hook does the whole
sum.

Invariants: replicas are summed once per step, whatever number of reductions it had; padding stays zero.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from closeranks.core.pieces import Piece
from closeranks.core.protocols import LocalParameter
from closeranks.core.traffic import count_collective
from closeranks.sync.collectives.async_reductions import run_reduction
from closeranks.sync.collectives.flat_buffer import FlatBufferSpec, ParameterSpan
from closeranks.sync.collectives.reductions import FlatReduction, ReductionFactory, plain_reductions
from closeranks.sync.collectives.torch_compat import reduce_scatter_flat
from closeranks.sync.reducers.local_parameters import CommGroup


class CountedReduceScatter:
    """FSDP2's own ``ReduceScatter``, counted."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        count_collective("data", "reduce-scatter", group.size(), input_tensor)
        work: dist.Work | None = reduce_scatter_flat(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        return work


class FsdpReduceScatter(CountedReduceScatter):
    """FSDP2's ``ReduceScatter``, by a reduction of ours."""

    def __init__(self, reduction: FlatReduction) -> None:
        self._reduction = reduction

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        run_reduction(self._reduction.reduce_scatter(input_tensor, output_tensor))
        return None


class FsdpAllReduceHook:
    """FSDP2's all-reduce hook: accumulates the results of a step's earlier backwards, and sums all in the last one."""

    def __init__(self, reduction: FlatReduction, num_missing: int) -> None:
        self._reduction, self._num_missing = reduction, num_missing
        self._held: Tensor | None = None
        self.is_last = True

    def __call__(self, arrived: Tensor) -> None:
        if not self.is_last:
            self._held = arrived.clone() if self._held is None else self._held.add_(arrived)
            arrived.zero_()  # FSDP2 adds it to the gradient now; the sum will contain it
            return
        if self._held is not None:
            arrived.add_(self._held)
            self._held = None
        if not self._num_missing:
            run_reduction(self._reduction.all_reduce(arrived))
            return
        padded = torch.nn.functional.pad(arrived, (0, self._num_missing))
        run_reduction(self._reduction.all_reduce(padded))
        arrived.copy_(padded[: arrived.numel()])


class FsdpReductions:
    """Reductions for all units of a rank's modules, one each: over replicas where there are any, else over shards."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        held: Sequence[LocalParameter],
        shard: CommGroup,
        replica: CommGroup,
        reduction_factory: ReductionFactory,
        is_exact: Callable[[LocalParameter], bool],
    ) -> None:
        """``is_exact``: parameters whose unit is summed uncompressed; so are parameters shared by several stages of a
        rank."""
        self._shard, self._replica = shard, replica
        self.reductions: list[FlatReduction] = []
        self._sums: list[list[FsdpAllReduceHook]] = []
        by_parameter = {one.parameter: one for one in held}
        copies = Counter(one.piece.name for one in held)
        exact = plain_reductions(replica if replica.size > 1 else shard)
        for module in modules:
            self._sums.append([])
            for part in fsdp_modules(module):
                if trained := _trained(part, by_parameter):
                    stays = any(is_exact(one) or copies[one.piece.name] > 1 for one in trained)
                    self._take(part, fsdp_buffer_spec(trained, shard.size), exact if stays else reduction_factory)

    def begin_backward(self, stage: int, *, is_last: bool) -> None:
        for one in self._sums[stage]:
            one.is_last = is_last

    def _take(self, part: FSDPModule, spec: FlatBufferSpec, make: ReductionFactory) -> None:
        if self._replica.size == 1:
            self.reductions.append(make(spec))
            part.set_custom_reduce_scatter(FsdpReduceScatter(self.reductions[-1]))  # type: ignore[arg-type]  # its class is private
            return
        share, rank = spec.numel // self._shard.size, self._shard.rank
        own = spec.slice(share * rank, share * (rank + 1))
        num_missing = -own.numel % self._replica.size
        self.reductions.append(make(replace(own, numel=own.numel + num_missing)))
        self._sums[-1].append(FsdpAllReduceHook(self.reductions[-1], num_missing))
        part.set_all_reduce_hook(self._sums[-1][-1])


def count_fsdp_reductions(part: FSDPModule, replica: CommGroup, *, has_own_reduction: bool) -> None:
    """Count what FSDP2 itself sends to reduce a unit's gradients; ``has_own_reduction``: a reduction of ours does the
    last sum, and counts it."""
    if not has_own_reduction or replica.size > 1:
        part.set_custom_reduce_scatter(CountedReduceScatter())  # type: ignore[arg-type]  # its class is private
    if not has_own_reduction and replica.size > 1:
        part.set_all_reduce_hook(lambda summed: count_collective("data", "all-reduce", replica.size, summed))


def fsdp_modules(module: nn.Module) -> Iterator[FSDPModule]:
    return (part for part in module.modules() if isinstance(part, FSDPModule))


def fsdp_param_groups(part: FSDPModule) -> list[Any]:
    """FSDP2's own parameter groups of a unit: torch 2.11 has one per module, later versions several."""
    state: Any = part._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def _trained(part: FSDPModule, held: Mapping[nn.Parameter, LocalParameter]) -> list[LocalParameter]:
    """A unit's trained parameters in the order in which FSDP2 lays them out."""
    parameters = [one.sharded_param for group in fsdp_param_groups(part) for one in group.fsdp_params]
    return [held[parameter] for parameter in parameters if parameter.requires_grad]


def fsdp_buffer_spec(held: Sequence[LocalParameter], num_shards: int) -> FlatBufferSpec:
    """See [Note: unit buffers]."""
    first = held[0].parameter
    shares = [_rows_each(one.piece, num_shards) * _row(one.piece) for one in held]
    share = sum(shares)
    spans: list[ParameterSpan] = []
    for rank in range(num_shards):
        offset = share * rank
        for one, size in zip(held, shares, strict=True):
            piece = one.piece.shard(0, rank, num_shards)
            if piece.numel:
                spans.append(ParameterSpan(piece, offset, 0, piece.numel))
            offset += size
    return FlatBufferSpec(tuple(spans), share * num_shards, first.dtype, first.device)


def _rows_each(piece: Piece, num_shards: int) -> int:
    return -(-piece.size[0] // num_shards)


def _row(piece: Piece) -> int:
    """Number of elements of a row."""
    return piece.numel // piece.size[0] if piece.size[0] else 0
