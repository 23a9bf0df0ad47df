"""How does one run a Llama's blocks as pipeline stages by hand? With torch's own stages and schedules.

Invariant: the blocks are the plain ones, cut evenly; the schedule alone says in which order they work.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from layouts_work import LayoutWork, Loop
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleZBVZeroBubble
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from workload import CLIP


class Stage(nn.Module):
    """Some of a Llama's blocks; the first stage looks tokens up, the last one says logits."""

    def __init__(self, whole: nn.Module, number: int, num_stages: int) -> None:
        super().__init__()
        share = len(whole.model.layers) // num_stages
        self.embed = whole.model.embed_tokens if number == 0 else None
        self.blocks = whole.model.layers[number * share : (number + 1) * share]
        is_last = number == num_stages - 1
        self.norm, self.head = (whole.model.norm, whole.lm_head) if is_last else (None, None)
        self.register_buffer("cos", whole.model.rope_cos, persistent=False)
        self.register_buffer("sin", whole.model.rope_sin, persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        if self.embed is not None:
            hidden = self.embed(hidden)
        for block in self.blocks:
            hidden = block(hidden, self.cos, self.sin)
        return hidden if self.norm is None else self.head(self.norm(hidden))


class PipelineParallel(Loop):
    """``schedule`` is ``1f1b`` (a stage a rank) or ``zbv`` (two a rank, in a V, with split backwards)."""

    def __init__(self, work: LayoutWork, schedule: str) -> None:
        super().__init__(work, 0)
        rank, size = dist.get_rank(), dist.get_world_size()
        whole = work.model()
        numbers, num_stages = ([rank], size) if schedule == "1f1b" else ([rank, 2 * size - 1 - rank], 2 * size)
        modules = nn.ModuleList(Stage(whole, number, num_stages) for number in numbers)
        device = torch.device("cpu")
        stages = [PipelineStage(m, n, num_stages, device) for m, n in zip(modules, numbers, strict=True)]
        made = {"loss_fn": self._loss, "scale_grads": False}
        if schedule == "1f1b":
            self._schedule: Any = Schedule1F1B(stages[0], work.num_micro, **made)
        else:
            self._schedule = ScheduleZBVZeroBubble(stages, work.num_micro, **made)
        self._has_first, self._has_last = 0 in numbers, num_stages - 1 in numbers
        self._parameters = list(modules.parameters())
        self._optimizer = work.optimizer(modules)

    def take_step(self, micro_batches: list[Any], rate: float) -> tuple[float, float]:
        read = [self.work.read(indices) for indices in micro_batches]
        tokens, targets = (torch.cat(parts) for parts in zip(*read, strict=True))
        losses: list[Tensor] = []
        inputs = (tokens,) if self._has_first else ()
        wanted = {"target": targets, "losses": losses} if self._has_last else {}
        self._schedule.step(*inputs, **wanted, return_outputs=False)
        norm = self._clip()
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self._optimizer.zero_grad()
        total = torch.stack(losses).detach().sum() if losses else torch.zeros(())
        dist.all_reduce(total)
        return total.item(), norm.item()

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        return total / self.work.num_targets

    def _clip(self) -> Tensor:
        """The norm is the whole model's: each rank knows that of its stages."""
        squared = get_total_norm([p.grad for p in self._parameters if p.grad is not None]) ** 2
        dist.all_reduce(squared)
        norm = squared.sqrt()
        clip_grads_with_norm_(self._parameters, CLIP, norm)
        return norm
