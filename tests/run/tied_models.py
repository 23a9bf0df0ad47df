"""Modules whose stages share: an autoencoder's mirrored weights, and a chain that runs through a module twice."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

WIDTH = 8


class Product(nn.Module):
    def __init__(self, weight: nn.Parameter, *, mirrored: bool) -> None:
        super().__init__()
        self.weight = weight
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        self.mirrored = mirrored

    def forward(self, hidden: Tensor) -> Tensor:
        weight = self.weight.t() if self.mirrored else self.weight
        return torch.tanh(nn.functional.linear(hidden, weight, self.bias))


class Autoencoder(nn.Module):
    """The weights of ``e1`` and ``e2`` stand in ``d2`` and ``d1`` again: in the other order."""

    def __init__(self) -> None:
        super().__init__()
        outer, inner = (nn.Parameter(0.3 * torch.randn(WIDTH, WIDTH)) for _ in range(2))
        self.e1, self.e2 = Product(outer, mirrored=False), Product(inner, mirrored=False)
        self.d2, self.d1 = Product(inner, mirrored=True), Product(outer, mirrored=True)

    def forward(self, features: Tensor) -> Tensor:
        return self.d1(self.d2(self.e2(self.e1(features))))


class Loop(nn.Module):
    """``model.stages`` may name a module several times."""

    def __init__(self) -> None:
        super().__init__()
        weights = (nn.Parameter(0.3 * torch.randn(WIDTH, WIDTH)) for _ in range(2))
        self.blocks = nn.ModuleList(Product(weight, mirrored=False) for weight in weights)

    def forward(self, features: Tensor) -> Tensor:
        first, second = self.blocks
        return first(second(second(first(features))))


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return (model(batch["x"]) - batch["y"]).square().mean()


def dataset() -> TensorDataset:
    features = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(5))
    return TensorDataset(features, features)
