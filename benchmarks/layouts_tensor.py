"""How does one split a Llama's matrices by hand? With torch's ``parallelize_module`` and its ready styles.

Columns of what reads the residual stream, rows of what writes it, the sequence split between them, and the loss on
logits that stay split. Invariant: the module is the plain one; everything parallel about it comes from the styles.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from layouts_work import LayoutWork, Loop
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.utils import clip_grad_norm_
from workload import CLIP


class TensorParallel(Loop):
    """All ranks train on the whole batch, each with a share of every matrix."""

    def __init__(self, work: LayoutWork) -> None:
        super().__init__(work, 0)
        self._model = split(work.model(), init_device_mesh("cpu", (dist.get_world_size(),)))
        self._parameters = list(self._model.parameters())
        self._optimizer = work.optimizer(self._model)

    def take_step(self, micro_batches: list[Any], rate: float) -> tuple[float, float]:
        total = torch.zeros(())
        for indices in micro_batches:
            tokens, targets = self.work.read(indices)
            with loss_parallel():
                loss = self._model(tokens, targets) / self.work.num_targets
                loss.backward()
            total += _local(loss.detach())
        norm = clip_grad_norm_(self._parameters, CLIP)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self._optimizer.zero_grad()
        return total.item(), _local(norm).item()


def split(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """As torch's tutorial on tensor parallelism splits a Llama."""
    plan: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "model.norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    whole = (Replicate(), None, None, None)
    block = {
        "input_layernorm": SequenceParallel(),
        "self_attn": PrepareModuleInput(input_layouts=(Shard(1), None, None, None), desired_input_layouts=whole),
        "self_attn.q_proj": ColwiseParallel(),
        "self_attn.k_proj": ColwiseParallel(),
        "self_attn.v_proj": ColwiseParallel(),
        "self_attn.o_proj": RowwiseParallel(output_layouts=Shard(1)),
        "post_attention_layernorm": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
    }
    plan |= {f"model.layers.{n}.{name}": style for n in range(len(model.model.layers)) for name, style in block.items()}
    return parallelize_module(model, mesh, plan)


def _local(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value
