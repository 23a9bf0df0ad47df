"""A reducer on top of FSDP2 (zero=3).

FSDP2's own hooks gather weights and reduce gradients while forward and backward run; this file decides when they may,
and presents each parameter's local rows to this rank's optimizer as an ordinary tensor. With ``hold`` = ``shards``
every micro-batch gathers and reduces. With ``step`` weights are gathered in the first forward of a step and kept, and
gradients are reduced in the last backward.

Invariants: gradients are sums, never means; a parameter that no sample used has gradient zero; replicas (HSDP) are
summed once per step. Ranks send zeros for what their own samples did not use, so which parameters those are is noted
before FSDP2 reduces.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from closeranks.core.phases import phase
from closeranks.core.pieces import Piece
from closeranks.core.protocols import LocalParameter, ParameterShard
from closeranks.sync.collectives.reductions import CompressibleReducer, FlatReduction, ReductionFactory
from closeranks.sync.reducers.fsdp_reductions import (
    FsdpReductions,
    count_fsdp_reductions,
    fsdp_modules,
    fsdp_param_groups,
)
from closeranks.sync.reducers.local_parameters import CommGroup
from closeranks.sync.reducers.partial_gradients import PartialGradient, sum_partial_gradients


@dataclass(frozen=True, slots=True)
class _Share:
    """A parameter and the part of it that this rank updates."""

    held: LocalParameter
    shard: ParameterShard

    def gradient(self) -> Tensor:
        """The local rows' part of the gradient; zeros where no sample used the parameter."""
        found = self.held.parameter.grad
        if found is None:
            return torch.zeros_like(self.shard.tensor)
        return local_of(found)


class FullyShardedReducer(CompressibleReducer):
    """FSDP2 behind ``core.protocols.Reducer``; ``modules`` are this rank's stages, each made by ``fully_shard``.

    ``reduction_factory``: how units are summed, over replicas where there are any (the modules are then sharded over
    the shard axis alone, [Note: unit buffers]), else over shards; None: as FSDP2 does it. Units with a parameter for
    which ``is_exact`` holds are summed uncompressed.
    """

    needs_equal_counts = True

    def __init__(
        self,
        held: Sequence[LocalParameter],
        modules: Sequence[nn.Module],
        shard: CommGroup,
        replica: CommGroup,
        *,
        hold: str,
        reduction_factory: ReductionFactory | None = None,
        is_exact: Callable[[LocalParameter], bool] = lambda one: False,
    ) -> None:
        self._modules = [module for module in modules if isinstance(module, FSDPModule)]
        self._shard, self._replica = shard, replica
        self._holds_step = hold == "step"
        self._trained = [one for one in held if one.parameter.requires_grad]
        self._shares = [share for one in self._trained if (share := self._share(one)).shard.tensor.numel()]
        self._gradients: list[Tensor] = []
        self._used: set[Tensor] = set()
        for part in (part for module in modules for part in fsdp_modules(module)):
            for group in fsdp_param_groups(part):
                group.post_backward = partial(self._after_backward, group, group.post_backward)
                group.wait_for_unshard = _timed(group.wait_for_unshard, "data.all_gather")
                group.finalize_backward = _timed(group.finalize_backward, "data.reduce_scatter")
        self._units: FsdpReductions | None = None
        if reduction_factory is not None:
            self._units = FsdpReductions(modules, self._trained, shard, replica, reduction_factory, is_exact)
        for part in (part for module in modules for part in fsdp_modules(module)):
            count_fsdp_reductions(part, replica, has_own_reduction=self._units is not None)

    def parameter_shards(self) -> Sequence[ParameterShard]:
        return tuple(share.shard for share in self._shares)

    def begin_step(self, step: int) -> None:
        self._used.clear()
        for reduction in self._reductions():
            reduction.begin_step(step)

    def begin_backward(self, stage: int = 0, *, is_last: bool) -> None:
        module = self._modules[stage]
        if self._units is not None:
            self._units.begin_backward(stage, is_last=is_last)
        module.set_is_last_backward(is_last)
        if self._holds_step:
            module.set_requires_gradient_sync(is_last)
            module.set_reshard_after_backward(is_last)
        elif self._replica.size > 1 and self._units is None:
            module.set_requires_all_reduce(is_last)

    def end_backward(self, stage: int = 0) -> None:
        """Nothing to do: FSDP2 has sent everything by the end of a backward."""

    def finish(self) -> None:
        whole = (one.parameter for one in self._trained if not _is_sharded(one))
        self._used.update(parameter for parameter in whole if parameter.grad is not None)
        self._gradients = [share.gradient() for share in self._shares]
        copies = self._add_copies()
        data = tuple(group.process_group for group in (self._shard, self._replica) if group.size > 1)
        pairs = enumerate(zip(self._shares, self._gradients, strict=True))
        sum_partial_gradients(
            [
                PartialGradient(gradient, (*(() if _is_sharded(share.held) else data), *share.held.partial_over))
                for number, (share, gradient) in pairs
                if number not in copies
            ]
        )
        for number, first in copies.items():
            self._gradients[number].copy_(self._gradients[first])
        for share, gradient in zip(self._shares, self._gradients, strict=True):
            share.shard.tensor.grad = gradient

    def gradients(self) -> Sequence[Tensor]:
        return self._gradients

    def primary_gradients(self) -> Sequence[Tensor]:
        """Each shard rank of the first replica holds the primary copy of its rows."""
        pairs = zip(self._shares, self._gradients, strict=True)
        return [gradient for share, gradient in pairs if share.shard.is_primary]

    def unused_parameters(self) -> Collection[str]:
        if all(one.parameter in self._used for one in self._trained):
            return ()
        used = {one.piece.name for one in self._trained if one.parameter in self._used}  # some have copies
        return {one.piece.name for one in self._trained} - used

    def gather_parameters(self) -> None:
        """Free weights that were gathered before the update; the next use gathers them again."""
        for module in self._modules:
            for part in module.modules():
                if isinstance(part, FSDPModule):
                    part.reshard()

    def release(self) -> None:
        self._gradients = []
        for share in self._shares:
            share.shard.tensor.grad = None
        for one in self._trained:  # also those of which this rank has no row
            one.parameter.grad = None

    def _after_backward(self, group: Any, reduce: Callable[..., None], *unused: Any) -> None:
        """Replaces a group's own ``post_backward``, which removes the gradients from its gathered parameters."""
        for one in group.fsdp_params if group.reduce_grads else ():
            gathered = getattr(one, "_unsharded_param", None)
            if one.unsharded_accumulated_grad is not None or (gathered is not None and gathered.grad is not None):
                self._used.add(one.sharded_param)
        with phase("data.reduce_scatter"):
            reduce(*unused)

    def _reductions(self) -> Sequence[FlatReduction]:
        return self._units.reductions if self._units is not None else ()

    def _share(self, one: LocalParameter) -> _Share:
        """FSDP2 shards the first dim. It does not shard 0-dim parameters: every rank holds them, and the first rank's
        copy is the primary one."""
        tensor = local_of(one.parameter).detach()
        is_first = self._replica.rank == 0
        if _is_sharded(one):
            piece = one.piece.shard(0, self._shard.rank, self._shard.size)
            return _Share(one, ParameterShard(tensor, piece, one.is_primary and is_first))
        return _Share(one, ParameterShard(tensor, one.piece, one.is_primary and is_first and self._shard.rank == 0))

    def _add_copies(self) -> dict[int, int]:
        """Add up the gradients of a parameter that two stages of this rank share and each has sharded: the first copy
        gets the sum, and it alone is reduced further. Maps the number of each other copy to that of the first."""
        first: dict[Piece, int] = {}
        copies: dict[int, int] = {}
        for number, share in enumerate(self._shares):
            owner = first.setdefault(share.shard.piece, number)
            if owner != number:
                self._gradients[owner] += self._gradients[number]
                copies[number] = owner
        return copies


def _timed(wait: Callable[..., None], name: str) -> Callable[..., None]:
    """A method of FSDP2 that waits for a collective, as a phase."""

    def timed(*arguments: Any) -> None:
        with phase(name):
            wait(*arguments)

    return timed


def local_of(tensor: Tensor) -> Tensor:
    """The part of a tensor in this rank's memory, sharing that memory."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _is_sharded(one: LocalParameter) -> bool:
    return isinstance(one.parameter, DTensor)
