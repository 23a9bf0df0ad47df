"""LARS and LAMB (layerwise learning rates) for parameters of which a rank may hold only shards.

[Note: trust ratios] A layer's rate depends on two norms of the whole parameter, its weight's and its update's. Each
rank computes the squares of its primary shards, and ONE small all-reduce (two values for each parameter of the model)
sums them. It is skipped where every rank holds its parameters whole. Norm weights and biases, and parameters with a
norm of zero, keep the ratio 1: their slot in the vector stays zero.

[Note: gating without the host] A skipped step must change nothing, bit for bit, and the host does not know that it is
skipped. Every change is an addition of a flat buffer that is filled with -0.0 where the step is skipped: x + -0.0 is x
for every x, whatever was computed before, NaN or not. The factors of decays are 1 then.

Invariant: all ranks that hold pieces of a parameter use the same bits of its ratio.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from closeranks.core.errors import ModelError
from closeranks.core.protocols import ParameterShard
from closeranks.optim.algorithms import ALGORITHMS, Algorithm, Total
from closeranks.optim.config import OptimConfig
from closeranks.optim.groups import ParameterFacts
from closeranks.optim.norms import norms_squared

_ALIGN = 16
"""Elements: foreach kernels use vectorized loads where each view begins at a multiple of this."""


@dataclass(frozen=True, slots=True)
class _Block:
    """The parameter shards of one group and dtype: one rate, one decay, and one flat buffer per step."""

    group: dict[str, Any]
    weights: list[Tensor]
    slots: Tensor
    """For each shard, the index of its parameter's norms; the last one, whose norms stay zero, if it has no ratio."""
    primary: list[int]
    """Indices of the primary shards, which this rank adds to the norms."""
    primary_slots: Tensor

    def scratch(self) -> tuple[Tensor, list[Tensor]]:
        """A flat buffer and a view of it for each shard, with the shard's strides."""
        starts, end = [], 0
        for weight in self.weights:
            starts.append(end)
            end += -(-weight.numel() // _ALIGN) * _ALIGN
        flat = torch.empty(end, dtype=self.weights[0].dtype, device=self.weights[0].device)
        strides = (torch.empty_like(weight, device="meta").stride() for weight in self.weights)
        places = zip(self.weights, strides, starts, strict=True)
        return flat, [flat.as_strided(weight.shape, stride, start) for weight, stride, start in places]

    def only(self, kept: list[int]) -> _Block:
        """The same block restricted to some of its shards."""
        number, primary = {old: new for new, old in enumerate(kept)}, [n for n in self.primary if n in kept]
        weights = [self.weights[n] for n in kept]
        places = [self.primary.index(n) for n in primary]
        return _Block(self.group, weights, self.slots[kept], [number[n] for n in primary], self.primary_slots[places])


class Layerwise(torch.optim.Optimizer):
    """Common base of LARS and LAMB. Uses ``found_inf`` and ``grad_scale`` as torch's fused optimizers do."""

    found_inf: Tensor
    grad_scale: Tensor | None = None

    def __init__(self, groups: list[dict[str, Any]], config: OptimConfig) -> None:
        _refuse_half_types(groups)
        super().__init__(groups, {"lr": config.lr})
        self.config = config

    def bind(self, shards: Sequence[ParameterShard], names: Sequence[str], total: Total | None) -> None:
        """``names``: all trained parameters of the model, in one order on every rank; ``total`` sums over all ranks."""
        self._num_slots = len(names)
        self._unused: set[int] = set()
        """Shards without a gradient in the latest step that had any; ``_used_blocks`` are the blocks of the others."""
        self._used_blocks: list[_Block] = []
        self._total = total
        slots = {name: slot for slot, name in enumerate(names)}
        by_tensor = {shard.tensor: shard for shard in shards}
        self._blocks = [
            self._block(group, [by_tensor[tensor] for tensor in group["params"] if tensor.dtype == dtype], slots)
            for group in self.param_groups
            for dtype in dict.fromkeys(tensor.dtype for tensor in group["params"])
        ]

    def _block(self, group: dict[str, Any], shards: Sequence[ParameterShard], slots: dict[str, int]) -> _Block:
        adapted = [ParameterFacts(shard.piece.name, shard.piece.shape).decays for shard in shards]
        places = [
            slots[shard.piece.name] if is_adapted else len(slots)
            for shard, is_adapted in zip(shards, adapted, strict=True)
        ]
        # Without sharding there is no sum over ranks: each rank counts all of its parameters.
        is_counted = [
            is_adapted and (shard.is_primary or self._total is None)
            for shard, is_adapted in zip(shards, adapted, strict=True)
        ]
        primary = [number for number, counted in enumerate(is_counted) if counted]
        device = shards[0].tensor.device
        return _Block(
            group,
            [shard.tensor for shard in shards],
            torch.tensor(places, dtype=torch.int64, device=device),
            primary,
            torch.tensor([places[number] for number in primary], dtype=torch.int64, device=device),
        )

    def _present(self) -> list[_Block]:
        """The blocks without the shards that have no gradient; those are mostly the same in each step."""
        unused = {id(weight) for block in self._blocks for weight in block.weights if weight.grad is None}
        if not unused:
            return self._blocks
        if unused != self._unused:
            kept = [[n for n, weight in enumerate(b.weights) if id(weight) not in unused] for b in self._blocks]
            self._used_blocks = [block.only(some) for block, some in zip(self._blocks, kept, strict=True) if some]
            self._unused = unused
        return self._used_blocks

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closure re-evaluates the loss
        skip = self.found_inf.bool()
        norms = torch.zeros(2, self._num_slots + 1, dtype=torch.float64, device=skip.device)
        prepared = []
        for block in self._present():
            flat, views = block.scratch()
            self._prepare(block, flat, views, skip)
            prepared.append((block, flat, views))
            if block.primary:
                norms[0].index_copy_(0, block.primary_slots, norms_squared([block.weights[n] for n in block.primary]))
                norms[1].index_copy_(0, block.primary_slots, norms_squared([views[n] for n in block.primary]))
        if self._total is not None:
            norms = self._total(norms)
        norms = norms.sqrt()
        for block, flat, views in prepared:
            ratios = self._trust(norms[0][block.slots], norms[1][block.slots], block.group["weight_decay"])
            rates = (ratios * block.group["lr"]).to(flat.dtype)
            self._apply(block, flat, views, list(rates.unbind()), skip)

    def _load_gradients(self, block: _Block, flat: Tensor, views: list[Tensor]) -> None:
        torch._foreach_copy_(views, [weight.grad for weight in block.weights])  # type: ignore[misc]  # see _present
        if self.grad_scale is not None:
            flat.div_(self.grad_scale)

    def _state_of(self, block: _Block, key: str) -> list[Tensor]:
        return [self.state[weight][key] for weight in block.weights]

    def _prepare(self, block: _Block, flat: Tensor, views: list[Tensor], skip: Tensor) -> None:
        """Fill the buffer with the update whose norm is taken."""
        raise NotImplementedError

    def _trust(self, weights: Tensor, updates: Tensor, decay: float) -> Tensor:
        """The trust ratio for each pair of norms."""
        raise NotImplementedError

    def _apply(self, block: _Block, flat: Tensor, views: list[Tensor], rates: list[Tensor], skip: Tensor) -> None:
        """Update the weights with the buffer, each shard at its own rate."""
        raise NotImplementedError


class Lars(Layerwise):
    """You, Gitman, Ginsburg 2017: v = momentum v + rate * trust |w| / (|g| + decay |w|) * (g + decay w), w = w - v."""

    def _prepare(self, block: _Block, flat: Tensor, views: list[Tensor], skip: Tensor) -> None:
        self._load_gradients(block, flat, views)

    def _trust(self, weights: Tensor, updates: Tensor, decay: float) -> Tensor:
        return _unless_zero(weights, updates, self.config.trust * weights / (updates + decay * weights))

    def _apply(self, block: _Block, flat: Tensor, views: list[Tensor], rates: list[Tensor], skip: Tensor) -> None:
        velocity = self._state_of(block, "momentum_buffer")
        if block.group["weight_decay"]:
            torch._foreach_add_(views, block.weights, alpha=block.group["weight_decay"])
        torch._foreach_mul_(views, rates)
        flat.masked_fill_(skip, -0.0)
        torch._foreach_mul_(velocity, _unless(skip, self.config.momentum, flat))
        torch._foreach_add_(velocity, views)
        torch._foreach_copy_(views, velocity)
        flat.neg_().masked_fill_(skip, -0.0)
        torch._foreach_add_(block.weights, views)


class Lamb(Layerwise):
    """You et al. 2019: Adam's direction r, bias corrected, with decay w added; w = w - rate |w| / |r| * r."""

    _is_even = True
    """Whether all shards had taken the same number of steps when this process started."""

    def restored(self) -> None:
        """Sync point."""
        counters = [counter for block in self._blocks for counter in self._state_of(block, "step")]
        self._is_even = len({counter.item() for counter in counters}) <= 1

    def _prepare(self, block: _Block, flat: Tensor, views: list[Tensor], skip: Tensor) -> None:
        first, second = self.config.betas
        means, squares = self._state_of(block, "exp_avg"), self._state_of(block, "exp_avg_sq")
        counters, is_even = self._state_of(block, "step"), self._is_even and not self._unused
        torch._foreach_add_(counters, [(~skip).to(torch.float32)] * len(counters))  # the host would read a single one
        self._load_gradients(block, flat, views)
        _blend(squares, second, flat.square(), views, skip)
        _blend(means, first, flat, views, skip)
        torch._foreach_copy_(views, squares)
        for part, counter in [(flat, counters[0])] if is_even else zip(views, counters, strict=True):
            count = counter.double()
            part.div_(1 - second**count).sqrt_().add_(self.config.eps).mul_(1 - first**count).reciprocal_()
        torch._foreach_mul_(views, means)
        if block.group["weight_decay"]:
            torch._foreach_add_(views, block.weights, alpha=block.group["weight_decay"])

    def _trust(self, weights: Tensor, updates: Tensor, decay: float) -> Tensor:
        return _unless_zero(weights, updates, weights / updates)

    def _apply(self, block: _Block, flat: Tensor, views: list[Tensor], rates: list[Tensor], skip: Tensor) -> None:
        torch._foreach_mul_(views, rates)
        flat.neg_().masked_fill_(skip, -0.0)
        torch._foreach_add_(block.weights, views)


def _blend(moments: list[Tensor], beta: float, values: Tensor, views: list[Tensor], skip: Tensor) -> None:
    """moments = beta moments + (1 - beta) values; ``values`` is laid out as the buffer of ``views``, and
    overwritten."""
    values.mul_(1 - beta).masked_fill_(skip, -0.0)
    torch._foreach_mul_(moments, _unless(skip, beta, values))
    torch._foreach_add_(
        moments, [values.as_strided(view.shape, view.stride(), view.storage_offset()) for view in views]
    )


def _unless_zero(weights: Tensor, updates: Tensor, ratio: Tensor) -> Tensor:
    return torch.where((weights > 0) & (updates > 0), ratio, torch.ones_like(ratio))


def _unless(skip: Tensor, factor: float, like: Tensor) -> Tensor:
    """The factor, or 1 in a skipped step."""
    return torch.full((), factor, dtype=like.dtype, device=like.device).masked_fill_(skip, 1.0)


def _refuse_half_types(groups: list[dict[str, Any]]) -> None:
    if any(tensor.dtype in (torch.bfloat16, torch.float16) for group in groups for tensor in group["params"]):
        what = (
            "lars and lamb cannot update bfloat16 or float16 parameters: their norms and small rates would round away"
        )
        raise ModelError(what, "Keep the parameters in float32 and set train.precision, or use adamw.")


def _zeros(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter, memory_format=torch.preserve_format)


@ALGORITHMS.register("lars")
def _lars(groups: list[dict[str, Any]], config: OptimConfig) -> Algorithm:
    optimizer = Lars(groups, config)
    return Algorithm(optimizer, lambda parameter: {"momentum_buffer": _zeros(parameter)}, optimizer.bind)


@ALGORITHMS.register("lamb")
def _lamb(groups: list[dict[str, Any]], config: OptimConfig) -> Algorithm:
    def init_state(parameter: Tensor) -> dict[str, Tensor]:
        counter = torch.zeros((), dtype=torch.float32, device=parameter.device)
        return {"step": counter, "exp_avg": _zeros(parameter), "exp_avg_sq": _zeros(parameter)}

    optimizer = Lamb(groups, config)
    return Algorithm(optimizer, init_state, optimizer.bind, optimizer.restored)
