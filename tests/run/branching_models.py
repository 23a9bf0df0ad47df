"""A model that uses some parameters for some samples only and one never, and what torch alone makes of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

STEPS, BATCH, RATE, DECAY, CLIP = 9, 6, 0.05, 0.3, 0.5


class Gated(nn.Module):
    """``side`` and ``gain`` work on samples whose hidden state is large somewhere."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)
        self.side = nn.Parameter(0.3 * torch.randn(width, width))
        self.gain = nn.Parameter(torch.tensor(0.8))
        self.never = nn.Parameter(torch.randn(5, width))

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.down(torch.tanh(self.up(hidden)))
        return hidden + self.gain * hidden @ self.side if hidden.max() > 1.6 else hidden


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.enter = nn.Linear(4, 6)
        self.blocks = nn.Sequential(Gated(6, 8), Gated(6, 8))
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.enter(x)))


STAGES = ["enter", "blocks.*", "head"]
TABLE = [{"pattern": "blocks.*.up.weight", "dim": 0}, {"pattern": "blocks.*.down.weight", "dim": 1}]


def dataset() -> TensorDataset:
    x = 1.5 * torch.randn(STEPS * BATCH, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return TensorDataset(x, (x.sum(1) > 0).long())


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


def tables(rule: dict[str, Any], steps: int = STEPS, **more: Any) -> dict[str, Any]:
    """One sample to a micro-batch: whether a parameter is used is a property of the sample."""
    return {
        "model": {
            "name": "tests.run.branching_models:Branching",
            "loss": "tests.run.branching_models:loss",
            "stages": STAGES,
            "tensor": TABLE,
        },
        "data": {"name": "tests.run.branching_models:dataset", "shuffle": "none"},
        "train": {"steps": steps, "global_batch": BATCH, "micro_batch": 1, "precision": "float64"},
        "optim": {
            "lr": RATE,
            "weight_decay": DECAY,
            "clip": CLIP,
            "schedule": {"name": "constant", "warmup": 0},
            **rule,
        },
        **more,
    }


def torch_alone(rule: str) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]], list[set[str]]]:
    """Weights, what the optimizer remembers by name, and the parameters without a gradient, step by step."""
    model, data = Branching().double(), dataset()
    named = dict(model.named_parameters())
    matrices, vectors = [p for p in named.values() if p.ndim > 1], [p for p in named.values() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
    make: dict[str, Any] = {
        "adamw": lambda: torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), foreach=False),
        "sgd": lambda: torch.optim.SGD(groups, lr=RATE, momentum=0.9, foreach=False),
    }
    optimizer, absent = make[rule](), []
    for step in range(STEPS):
        for number in range(step * BATCH, (step + 1) * BATCH):
            x, y = data[number]
            (nn.functional.cross_entropy(model(x[None]), y[None]) / BATCH).backward()
        absent.append({name for name, parameter in named.items() if parameter.grad is None})
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    memory = {name: dict(optimizer.state[parameter]) for name, parameter in named.items()}
    return {name: parameter.detach() for name, parameter in named.items()}, memory, absent
