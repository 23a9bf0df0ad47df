"""What do ranks train while checkpoints of it are timed? Plain tensors and AdamW, as large as the state is to be.

Invariant: every contender saves the same tensors under the same names, and training never waits for another rank but in
one small all-reduce a step, which keeps the ranks in step as gradients would.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Work:
    """Each rank has a model of its own, as ranks that shard a larger one do."""

    width: int = 2048
    num_layers: int = 11
    target_s: float = 0.5
    """Of a step: the batch is chosen for it, if one sample does not take as long."""

    @property
    def state_bytes(self) -> int:
        """Of a rank: weights and AdamW's two averages."""
        return 3 * 4 * self.num_layers * self.width**2


class Job:
    """The training of one rank."""

    def __init__(self, work: Work, batch: int = 8) -> None:
        self._rank = dist.get_rank()
        torch.manual_seed(self._rank)
        width = work.width
        weights = [torch.randn(width, width) / width**0.5 for _ in range(work.num_layers)]
        self._weights = {f"rank{self._rank}.layers.{n}": torch.nn.Parameter(one) for n, one in enumerate(weights)}
        self._optimizer = torch.optim.AdamW(self._weights.values(), lr=1e-5, fused=True)
        self._width, self.batch, self.num_steps = width, batch, 0
        self.step()

    def choose_batch(self, target_s: float) -> None:
        """From two sizes, by what a sample adds; the same on all ranks."""
        small, large = 8, 32
        seconds = []
        for self.batch in (small, large):
            tries = []
            for _ in range(3):
                began_at = time.perf_counter()
                self.step()
                tries.append(time.perf_counter() - began_at)
            seconds.append(min(tries))
        per_sample_s = max((seconds[1] - seconds[0]) / (large - small), 1e-6)
        wanted = torch.tensor(max(1.0, small + (target_s - seconds[0]) / per_sample_s))
        dist.all_reduce(wanted, op=dist.ReduceOp.MIN)
        self.batch = int(wanted.item())

    def step(self, before_update: Callable[[], object] = lambda: None) -> float:
        """Forward, backward, update; ``before_update`` is where a copy under way must be done with the state."""
        x = torch.randn(self.batch, self._width)
        for weight in self._weights.values():
            x = x + F.gelu(x @ weight)
        loss = x.square().mean()
        loss.backward()
        before_update()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.num_steps += 1
        told = loss.detach()
        dist.all_reduce(told)
        return told.item()

    def state(self) -> dict[str, Tensor]:
        """By name: ``model/...``, ``optimizer/...``; the tensors themselves."""
        found: dict[str, Tensor] = {}
        for name, weight in self._weights.items():
            found[f"model/{name}"] = weight.detach()
            for kind in ("exp_avg", "exp_avg_sq"):
                found[f"optimizer/{name}/{kind}"] = self._optimizer.state[weight][kind]
        return found
