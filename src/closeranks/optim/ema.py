"""An exponential moving average of weights, updated on the device.

``average = d * average + (1 - d) * weights`` after every step that is taken, with ``d`` the smaller of the decay and
``(1 + n) / (10 + n)`` at step ``n``: early on, an average over many steps would contain untrained weights. Invariants:
no host sync; a step that is not taken changes no bit of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from closeranks.core.protocols import ParameterShard


def decay_at(step: int, decay: float) -> float:
    """``step``: the number of steps finished, this one included."""
    return min(decay, (1 + step) / (10 + step))


class WeightAverage:
    """One tensor for each parameter shard, on the same device and of the same shape, like the optimizer's moments."""

    @torch.no_grad()
    def __init__(self, shards: Sequence[ParameterShard], decay: float) -> None:
        self._shards, self._decay = tuple(shards), decay
        self.tensors = [shard.tensor.detach().clone() for shard in shards]

    @torch.no_grad()
    def update(self, step: int, taken: Tensor) -> None:
        """``taken``: 1 or 0 on the device."""
        share = 1.0 - decay_at(step, self._decay)
        for shard, average in zip(self._shards, self.tensors, strict=True):
            average.lerp_(shard.tensor, (share * taken).to(average.dtype))

    @torch.no_grad()
    def restart(self) -> None:
        """Reset the average to the weights."""
        for shard, average in zip(self._shards, self.tensors, strict=True):
            average.copy_(shard.tensor)

    @torch.no_grad()
    def swap(self) -> None:
        """Swap weights and average; swapping twice restores every bit."""
        for shard, average in zip(self._shards, self.tensors, strict=True):
            weights = shard.tensor.clone()
            shard.tensor.copy_(average)
            average.copy_(weights)
