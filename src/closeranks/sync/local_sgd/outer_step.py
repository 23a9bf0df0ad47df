"""The outer step of Local SGD and DiLoCo, which synchronizes the replicas.

[Note: the outer step] At a synchronization each replica computes its delta, the anchor minus its weights; the anchor
holds the weights after the last synchronization. The mean of all deltas is a gradient for the anchor, and SGD with
(Nesterov) momentum updates it; then every replica continues from the anchor. That is DiLoCo (Douillard et al., 2023).
With a rate of 1 and no momentum the anchor becomes the mean of the weights, which is local SGD; one fragment at a time,
it is streaming DiLoCo.

A rank synchronizes the parameter shards that it updates (or whole parameters): ranks at the same coordinate in
different replicas hold the same shards. All shards of a fragment are in one flat tensor, which has a reduction of its
own: exact, or compressed, with error feedback for the next synchronization.

Invariants: every replica computes the same bits, from the same sums; between synchronizations nothing here is changed;
where replicas processed different numbers of samples, each is weighted by its share of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import NamedTuple

import torch
from torch import Tensor

from closeranks.core.protocols import ErrorFeedbackTensor, ParameterShard
from closeranks.sync.collectives.async_reductions import run_reduction
from closeranks.sync.collectives.flat_buffer import FlatBufferSpec, ParameterSpan, in_memory_order, memory_order
from closeranks.sync.collectives.reductions import ReductionFactory
from closeranks.sync.reducers.local_parameters import view_like


@dataclass(frozen=True, slots=True)
class OuterSgd:
    """SGD on the anchor, as the table ``[sync.local]`` configures it."""

    lr: float
    momentum: float
    nesterov: bool

    def update(self, anchor: Tensor, momentum: Tensor | None, delta: Tensor) -> None:
        """In place; as ``torch.optim.SGD`` with ``delta`` as the gradient."""
        if momentum is None:
            anchor.sub_(delta, alpha=self.lr)
            return
        momentum.mul_(self.momentum).add_(delta)
        ahead = delta.add(momentum, alpha=self.momentum) if self.nesterov else momentum
        anchor.sub_(ahead, alpha=self.lr)


class OuterState(NamedTuple):
    """The state of one parameter shard between synchronizations: views of the flat tensors."""

    shard: ParameterShard
    anchor: Tensor
    momentum: Tensor | None
    """None where the outer optimizer has no momentum."""


class _Fragment:
    """Parameter shards of one dtype that synchronize together, their flat tensors, and the reduction of these."""

    def __init__(
        self, shards: Sequence[ParameterShard], num_replicas: int, factory: ReductionFactory, *, has_momentum: bool
    ) -> None:
        self.shards = shards
        spec = _buffer_spec(shards, num_replicas)
        self.anchor = torch.zeros(spec.numel, dtype=spec.dtype, device=spec.device)
        self.momentum = torch.zeros_like(self.anchor) if has_momentum else None
        self.reduction = factory(spec)

    def views(self, flat: Tensor) -> Iterator[Tensor]:
        offset = 0
        for shard in self.shards:
            yield view_like(flat, offset, shard.tensor)
            offset += shard.tensor.numel()


def _buffer_spec(shards: Sequence[ParameterShard], num_replicas: int) -> FlatBufferSpec:
    """The shards one after the other, padded so that the buffer divides evenly."""
    spans, offset = list[ParameterSpan](), 0
    for shard in shards:
        piece, (begin, end) = replace(shard.piece, flat=None), shard.piece.flat or (0, shard.piece.numel)
        if shard.piece.flat is None:
            piece = in_memory_order(piece, memory_order(shard.tensor))
        spans.append(ParameterSpan(piece, offset, begin, end))
        offset += end - begin
    first = shards[0].tensor
    return FlatBufferSpec(tuple(spans), -(-offset // num_replicas) * num_replicas, first.dtype, first.device)


class OuterOptimizer:
    """``reduction_factory``: how deltas are summed over replicas; ``exact_factory``: the same for those that must not
    be compressed.

    Call sequence: ``outer_step`` after the inner update of each step that synchronizes, with the fragments that do;
    ``restart`` after the weights were replaced from outside.
    """

    def __init__(
        self,
        shards: Sequence[ParameterShard],
        fragment_of: Mapping[str, int],
        rule: OuterSgd,
        num_replicas: int,
        reduction_factory: ReductionFactory,
        exact_factory: ReductionFactory,
        exact: Collection[str] = (),
        alone: Collection[str] = (),
    ) -> None:
        """``fragment_of``: by parameter. ``exact``: those that must not be compressed. ``alone``: those of which
        another rank of the same replica holds a copy that must get the same bits. A backend may sum a long tensor in an
        order that depends on the offset in it, so each of these is reduced by itself."""
        self._rule, self._num_replicas = rule, num_replicas
        self._fragments = dict[int, list[_Fragment]]()
        grouped = dict[tuple[int, torch.dtype, bool, str], list[ParameterShard]]()
        for shard in shards:
            name = shard.piece.name
            key = (fragment_of[name], shard.tensor.dtype, name in exact, name if name in alone else "")
            grouped.setdefault(key, []).append(shard)
        for (number, _, is_exact, _), members in grouped.items():
            chosen = exact_factory if is_exact else reduction_factory
            made = _Fragment(members, num_replicas, chosen, has_momentum=rule.momentum > 0)
            self._fragments.setdefault(number, []).append(made)
        self.restart()

    @torch.no_grad()
    def restart(self) -> None:
        """Set the anchor to the weights and clear the momentum; error feedback stays."""
        for part in self._parts():
            if part.momentum is not None:
                part.momentum.zero_()
            for shard, anchor in zip(part.shards, part.views(part.anchor), strict=True):
                anchor.copy_(shard.tensor)

    @torch.no_grad()
    def outer_step(self, step: int, fragments: Iterable[int], share: float | None = None) -> None:
        """A collective of the replicas. ``share``: the weight of this one's delta; None: all have the same."""
        for number in fragments:
            for part in self._fragments.get(number, ()):
                part.reduction.begin_step(step)
                self._sync_fragment(part, share)

    def error_feedback(self) -> Iterator[ErrorFeedbackTensor]:
        """Error feedback of the compressed deltas."""
        for part in self._parts():
            yield from part.reduction.error_feedback()

    def compression_errors(self) -> list[Tensor]:
        """As for a reducer."""
        return [found for part in self._parts() if (found := part.reduction.compression_errors()) is not None]

    def states(self) -> Iterator[OuterState]:
        for part in self._parts():
            momenta = repeat(None) if part.momentum is None else part.views(part.momentum)
            yield from map(OuterState, part.shards, part.views(part.anchor), momenta)

    def _sync_fragment(self, part: _Fragment, share: float | None) -> None:
        delta = torch.zeros_like(part.anchor)  # allocated only while synchronizing
        for shard, own, anchor in zip(part.shards, part.views(delta), part.views(part.anchor), strict=True):
            torch.sub(anchor, shard.tensor, out=own)
        delta.mul_(1.0 / self._num_replicas if share is None else share)
        run_reduction(part.reduction.all_reduce(delta))
        part.reduction.commit(torch.ones((), device=delta.device))
        self._rule.update(part.anchor, part.momentum, delta)
        for shard, anchor in zip(part.shards, part.views(part.anchor), strict=True):
            shard.tensor.copy_(anchor)

    def _parts(self) -> Iterator[_Fragment]:
        for number in sorted(self._fragments):
            yield from self._fragments[number]
