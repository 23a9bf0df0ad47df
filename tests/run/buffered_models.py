"""A user's module with persistent buffers in every place: at the root, beside the units, within them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

STAGES = ["embed", "blocks.*", "head"]


class Tables(nn.Module):
    """No parameter, so no unit has to hold it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("counts", torch.arange(30))


class Block(nn.Module):
    """Normalised over the batch, so that running estimates are kept."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.linear = nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.linear(torch.tanh(self.norm(hidden)))


class Buffered(nn.Module):
    def __init__(self, width: int = 12, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Linear(6, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.head = nn.Linear(width, 3)
        self.tables = Tables()
        self.register_buffer("mark", torch.linspace(0.0, 1.0, 7))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(x)))


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(
        torch.randn(61, 6, dtype=torch.float64, generator=generator), torch.randint(3, (61,), generator=generator)
    )
