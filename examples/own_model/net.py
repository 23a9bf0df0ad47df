"""A model, its loss and its data, named by job.toml beside it."""

import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.answer = nn.Linear(width, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.answer(self.layers(x))


def loss(net: Net, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(net(batch["x"]), batch["y"])


def data(num_samples: int = 1000, seed: int = 0) -> Dataset[tuple[torch.Tensor, ...]]:
    x = torch.randn(num_samples, 8, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (x.sum(1) > 0).long())
