"""A small model and dataset of the user's own, for jobs of tests: 27 samples, so that an epoch ends inside a step."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.run import small


def data() -> torch.utils.data.TensorDataset:
    return small.dataset(27)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 2))


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return small.loss(model, batch)


JOB = """
[run]
deterministic = true
[model]
name = "tests.cli.own_numbers:model"
loss = "tests.cli.own_numbers:loss"
[data]
name = "tests.cli.own_numbers:data"
log_samples = true
[train]
epochs = 2
global_batch = 8
micro_batch = 2
[checkpoint]
every = 0
"""
