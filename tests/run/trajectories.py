"""A short training run as values: what tests of the step compare between layouts, restarts and repetitions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from closeranks import Hook, Session
from closeranks.core.events import StepDone
from closeranks.core.system.environment import set_world
from closeranks.core.world import World
from closeranks.run.job.job import load_job
from closeranks.run.loop import run_session

TINY = {
    "model": {"name": "llama", "dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 64},
    "data": {"name": "text", "seq_len": 16, "max_bytes": 20_000},
    "train": {"steps": 5, "global_batch": 12, "micro_batch": 1},
    "optim": {"lr": 1e-2, "clip": 0.5},
}


@dataclass(frozen=True)
class Trajectory:
    losses: list[float]
    norms: list[float]
    taken: list[bool]
    gradients: dict[str, torch.Tensor]
    """Scaled and clipped, of the first step."""
    weights: dict[str, torch.Tensor]
    metrics: list[dict[str, float]]
    eval_loss: float | None
    scales: list[float]


class Watch(Hook):
    """Keeps every step, and the first step's gradients as the optimizer saw them."""

    def __init__(self) -> None:
        self.steps: list[StepDone] = []
        self.gradients: dict[str, torch.Tensor] = {}

    def on_start(self, session: Session) -> None:
        release = session.engine.reducer.release

        def keep_first() -> None:
            if not self.gradients:
                named = session.model.named_parameters()
                self.gradients = {name: p.grad.clone() for name, p in named if p.grad is not None}
            release()

        session.engine.reducer.release = keep_first  # type: ignore[method-assign]

    def on_step(self, session: Session, step: StepDone) -> None:
        self.steps.append(step)


def merged(changes: dict[str, Any]) -> dict[str, Any]:
    tables = {name: dict(table) for name, table in TINY.items()}
    for name, table in changes.items():
        base = {} if "name" in table and name in ("model", "data") else tables.get(name, {})
        tables[name] = {**base, **table}
    return tables


def trajectory(folder: Path, changes: dict[str, Any], hooks: Sequence[Hook] = ()) -> Trajectory:
    """Train in this process, on the world it stands in."""
    watch = Watch()
    job = load_job(None, extra=merged(changes)).value
    session = Session.from_job(job, folder, [watch, *hooks])
    result = run_session(session)
    return Trajectory(
        losses=[step.loss for step in watch.steps],
        norms=[step.grad_norm for step in watch.steps],
        taken=[step.taken for step in watch.steps],
        gradients=watch.gradients,
        weights={name: p.detach().clone() for name, p in session.model.state_dict().items()},
        metrics=[step.metrics for step in watch.steps],
        eval_loss=result.eval.loss if result.eval else None,
        scales=[step.loss_scale for step in watch.steps],
    )


def alone(folder: Path, changes: dict[str, Any]) -> Trajectory:
    """The single-process run that everything is compared with."""
    set_world(World(launcher="testing"))
    torch.set_num_threads(1)
    return trajectory(folder, changes)


def largest_difference(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    """Relative to each tensor's own size, over all tensors."""
    assert left.keys() == right.keys()
    return max(
        ((left[n].double() - right[n].double()).norm() / right[n].double().norm().clamp(min=1e-30)).item() for n in left
    )


def relative(left: Sequence[float], right: Sequence[float]) -> float:
    assert len(left) == len(right)
    return max(abs(a - b) / abs(b) for a, b in zip(left, right, strict=True))
