"""Modules and data as users write them: nothing in them knows of closeranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset


class Mixer(nn.Module):
    """A residual feed-forward block."""

    def __init__(self, width: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(hidden)))))


class Net(nn.Module):
    def __init__(self, width: int = 12, hidden: int = 20, depth: int = 3, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, width)
        self.blocks = nn.Sequential(*(Mixer(width, hidden, dropout) for _ in range(depth)))
        self.head = nn.Linear(width, 30)
        nn.init.normal_(self.head.weight, std=0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(tokens)))


class Forgetful(Mixer):
    """Drops within the hidden layer: where that is split, ranks draw masks of their own."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(self.dropout(nn.functional.gelu(self.up(self.norm(hidden)))))


def forgetful(dropout: float = 0.5) -> nn.Module:
    net = Net()
    net.blocks[1] = Forgetful(12, 20, dropout)
    return net


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def dataset() -> TensorDataset:
    tokens = torch.randint(30, (61, 9), generator=torch.Generator().manual_seed(3))
    return TensorDataset(tokens[:, :-1], tokens[:, 1:])


def broken_stage(**args: Any) -> nn.Module:
    net = Net(**args)
    net.extra = nn.Parameter(torch.zeros(3))
    return net


class Attention(nn.Module):
    """Separate projections with biases, as many own models have them, and a scale within heads."""

    def __init__(self, width: int, head_dim: int) -> None:
        super().__init__()
        self.norm, self.head_dim = nn.LayerNorm(width), head_dim
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, head_dim))

    def forward(self, hidden: Tensor) -> Tensor:
        x = self.norm(hidden)
        q, k, v = (part(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = nn.functional.scaled_dot_product_attention(q * self.scale, k, v, is_causal=True)
        return hidden + self.o(mixed.transpose(1, 2).flatten(2))


class Attentive(nn.Module):
    def __init__(self, width: int = 16, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, width)
        self.blocks = nn.Sequential(*(Attention(width, width // 4) for _ in range(depth)))
        self.head = nn.Linear(width, 30)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(tokens)))
