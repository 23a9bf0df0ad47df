"""Any module, any dataset, ten lines. Run it with `python examples/ten_lines.py`, or on two workers with
`closeranks run -n 2 examples/ten_lines.py`: the result is the same."""

import torch
from torch import nn

import closeranks


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 2))


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


x = torch.randn(1000, 8, generator=torch.Generator().manual_seed(0))
data = torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())
result = closeranks.train(model, data, loss, train={"steps": 100, "global_batch": 32}, optim={"lr": 3e-3})
print(f"loss {result.loss:.4f} after {result.steps} steps; everything else is in {result.folder}")
