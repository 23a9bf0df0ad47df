"""The smallest runs there are: a linear model on numbers, in this process, in milliseconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from closeranks import Hook, Loss, Result, Session
from closeranks.core.events import Event
from closeranks.run.loop import run_session
from closeranks.telemetry.run_log.recorder import read_events

Tables = dict[str, Any]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


def counted(model: nn.Module, batch: dict[str, Tensor]) -> Loss:
    answers = model(batch["x"])
    total = nn.functional.cross_entropy(answers, batch["y"], reduction="sum")
    return Loss(total, float(len(answers)), {"accuracy": (answers.argmax(1) == batch["y"]).sum()})


def dataset(num_samples: int = 64, seed: int = 0) -> TensorDataset:
    x = torch.randn(num_samples, 4, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (x.sum(1) > 0).long())


def open_session(
    folder: Path,
    *,
    model: Callable[[], nn.Module] | nn.Module = net,
    loss: Any = loss,
    data: Any = None,
    eval_data: Any = None,
    hooks: Sequence[Hook] = (),
    metrics: Sequence[str] = (),
    collate: Any = None,
    **tables: Tables,
) -> Session:
    given: Tables = {
        "run": {"folder": str(folder)},
        "train": {"steps": 4, "global_batch": 8, "micro_batch": 4},
        "optim": {"lr": 1e-2},
    }
    merged = {name: {**given.get(name, {}), **tables.get(name, {})} for name in {**given, **tables}}
    return Session(
        model,
        dataset() if data is None else data,
        loss,
        eval_data=eval_data,
        hooks=hooks,
        metrics=metrics,
        collate=collate,
        **merged,
    )


def train(folder: Path, **changes: Any) -> Result:
    return run_session(open_session(folder, **changes))


def events(folder: Path, rank: int = 0) -> list[Event]:
    lines = read_events(folder / "metrics" / f"rank-{rank:05d}.jsonl")
    return [event for _, event in lines if event is not None]


def of_kind(folder: Path, kind: type[Event], rank: int = 0) -> list[Any]:
    return [event for event in events(folder, rank) if isinstance(event, kind)]
