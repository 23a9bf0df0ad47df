"""Factories and losses of a user, right and wrong in every way that test_user names."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from closeranks.core.protocols import Loss


def good(width: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, 1))


class Stacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.Linear(2, 2))
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        hidden = self.head(batch["x"])
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden.square().mean()


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return (self(batch["x"]).squeeze(-1) - batch["y"]).square().mean()


def raises() -> nn.Module:
    raise ValueError("three\nlayers\nare too many")  # raises here


def raises_deep() -> nn.Module:
    return nn.Linear(2, "wide")  # type: ignore[arg-type]  # raises in torch


def not_a_module() -> Any:
    return {"weights": 3}


BUILT = nn.Linear(2, 2)
NUMBER = 3


def mean_loss(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return (module(batch["x"]).squeeze(-1) - batch["y"]).square().mean()


def summed_loss(module: nn.Module, batch: dict[str, Tensor]) -> Loss:
    errors = (module(batch["x"]).squeeze(-1) - batch["y"]).square()
    return Loss(total=errors.sum(), weight=float(len(errors)), metrics={"hits": (errors < 1).sum()})


def loss_is_a_float(module: nn.Module, batch: dict[str, Tensor]) -> Any:
    return mean_loss(module, batch).item()


def loss_per_sample(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return (module(batch["x"]).squeeze(-1) - batch["y"]).square()


def detached_loss(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return mean_loss(module, batch).detach()


def loss_total_is_a_float(module: nn.Module, batch: dict[str, Tensor]) -> Any:
    return Loss(total=1.0, weight=1.0)  # type: ignore[arg-type]


def key_error_loss(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return module(batch["features"]).mean()  # no such key


def device_error_loss(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory")
