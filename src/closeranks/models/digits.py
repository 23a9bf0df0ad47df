"""The small convnet for digits, and its model spec.

It is the one model with batch normalisation, whose running statistics are buffers that belong to the state. Invariant:
statistics are those of a micro-batch, so the same micro-batches give the same gradients on any number of ranks.
"""

from __future__ import annotations

from math import prod, sqrt

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from closeranks.core.protocols import ActivationCollectives, Batch, Loss, PipelineSpec, ShardingRule
from closeranks.facts.shapes.digits import DigitsShape, flops_per_sample
from closeranks.models.batches import batch_tensor
from closeranks.models.config import DigitsConfig
from closeranks.models.parameter_init import fill_constant, fill_normal
from closeranks.models.registry import MODELS


class ConvBlock(nn.Module):
    """Convolution, batch norm, ReLU."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(num_in, num_out, kernel_size=3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(num_out)

    def forward(self, image: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(image)))


class Digits(nn.Module):
    """Images [batch, 1, 8, 8] in, ten logits out."""

    def __init__(self, shape: DigitsShape, dropout: float = 0.0) -> None:
        super().__init__()
        self.stem = ConvBlock(1, shape.channels)
        self.body = ConvBlock(shape.channels, 2 * shape.channels)
        self.hidden = nn.Linear(shape.flat_dim, shape.hidden_dim)
        self.output = nn.Linear(shape.hidden_dim, shape.num_classes)
        self.dropout = dropout

    def forward(self, image: Tensor) -> Tensor:
        features = F.max_pool2d(self.body(self.stem(image)), 2).flatten(1)
        hidden = F.dropout(F.relu(self.hidden(features)), self.dropout, self.training)
        logits: Tensor = self.output(hidden)
        return logits


class DigitsSpec:
    """The convnet as a run sees it (``core.protocols.ModelSpec``)."""

    def __init__(self, config: DigitsConfig) -> None:
        self.config = config
        self.shape = config.shape()
        self.name = "digits"
        self.metrics: tuple[str, ...] = ("accuracy",)
        self.builds_on_meta = True
        self.item = "sample"
        self.items_per_sample = 1
        self.flops_per_item = flops_per_sample(self.shape)
        self.blocks: tuple[str, ...] = ()
        self.compile_units: tuple[str, ...] = ()
        self.sharding_rules: tuple[ShardingRule, ...] = ()
        self.activation_collectives: tuple[ActivationCollectives, ...] = ()
        self.pipeline_spec: PipelineSpec | None = None

    def build(self) -> nn.Module:
        return Digits(self.shape, self.config.dropout)

    def init_parameter(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        if name.endswith("norm.weight"):
            fill_constant(parameter, 1.0)
        elif name.endswith("bias"):
            fill_constant(parameter, 0.0)
        else:
            fill_normal(parameter, sqrt(2.0 / prod(parameter.shape[1:])), generator)

    def init_buffers(self, module: nn.Module) -> None:
        for part in module.modules():
            if isinstance(part, _BatchNorm):  # may have been replaced by one that spans ranks
                part.reset_running_stats()

    def loss(self, module: nn.Module, batch: Batch) -> Loss:
        """``image`` [B, 1, 8, 8] and ``label`` [B]; reports the number of correct predictions."""
        label = batch_tensor(batch, "label", self.name).long()
        logits = module(batch_tensor(batch, "image", self.name))
        wide = logits if logits.dtype == torch.float64 else logits.float()
        correct = (wide.detach().argmax(dim=-1) == label).sum()
        total = F.cross_entropy(wide, label, reduction="sum")
        return Loss(total=total, weight=float(label.shape[0]), metrics={"accuracy": correct})


@MODELS.register("digits")
def digits_spec(config: DigitsConfig, *, seq_len: int) -> DigitsSpec:
    return DigitsSpec(config)
