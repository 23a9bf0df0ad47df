"""How does one spread state over data ranks by hand? DDP, DDP with torch's sharded optimizer, and FSDP2.

Invariant: each is what torch's documentation leads a careful engineer to for speed, with fused AdamW and nothing else.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from layouts_work import LayoutWork, Loop
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from workload import BETAS, CLIP


class _DataLoop(Loop):
    """A loop whose ranks each train on a share of the batch and hold, between steps, what ``wrap`` leaves them."""

    def __init__(self, work: LayoutWork) -> None:
        super().__init__(work, dist.get_rank())
        self.model = self.wrap(work.model())
        self.parameters = list(self.model.parameters())
        self.optimizer = self.make_optimizer()

    def wrap(self, model: nn.Module) -> nn.Module:
        raise NotImplementedError

    def make_optimizer(self) -> torch.optim.Optimizer:
        return self.work.optimizer(self.model)

    def before_backward(self, *, is_last: bool) -> Any:
        return nullcontext()

    def clip(self) -> Tensor:
        return clip_grad_norm_(self.parameters, CLIP)

    def take_step(self, micro_batches: list[Any], rate: float) -> tuple[float, float]:
        total = torch.zeros(())
        for number, indices in enumerate(micro_batches, start=1):
            tokens, targets = self.work.read(indices)
            with self.before_backward(is_last=number == len(micro_batches)):
                loss = self.model(tokens, targets) / self.work.num_targets
                loss.backward()
            total += loss.detach()
        norm = self.clip()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        dist.all_reduce(total)
        return total.item() / self.work.num_ranks, norm.item()


class Ddp(_DataLoop):
    """Everything on every rank; gradients travel in the last backward."""

    def wrap(self, model: nn.Module) -> nn.Module:
        return DistributedDataParallel(model, gradient_as_bucket_view=True, broadcast_buffers=False)

    def before_backward(self, *, is_last: bool) -> Any:
        return nullcontext() if is_last else self.model.no_sync()


class ZeroRedundancy(Ddp):
    """DDP whose optimizer updates a share of the parameters on each rank and broadcasts them."""

    def make_optimizer(self) -> torch.optim.Optimizer:
        from torch.distributed.optim import ZeroRedundancyOptimizer  # compiles on import, with a warning of its own

        return ZeroRedundancyOptimizer(
            self.work.groups(self.model),
            optimizer_class=torch.optim.AdamW,
            parameters_as_bucket_view=True,
            lr=self.work.lr,
            betas=BETAS,
            fused=True,
        )


class Fsdp2(_DataLoop):
    """``fully_shard`` for each block and the rest: weights are gathered for each use, and each micro-batch's gradients
    are reduced at once, so that no rank ever holds a whole gradient."""

    def wrap(self, model: nn.Module) -> nn.Module:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        *others, last = model.model.layers
        for block in others:
            fully_shard(block, mesh=mesh)
        fully_shard(last, mesh=mesh, reshard_after_forward=False)  # its backward follows at once
        return fully_shard(model, mesh=mesh)

    def clip(self) -> Tensor:
        return super().clip().full_tensor()  # the norm is a DTensor: every rank knows its part of it
