"""Checks that a job trains the same under a layout as in one process.

A few steps are recorded on the workers (losses, the first step's gradients, the weights at the end, each rank its own
pieces), once in one process and once under the layout, and compared tensor by tensor. Invariant: no process holds more
than one whole tensor beside its own part of the model, and a missing or extra tensor is a difference.

[Note: what a difference is measured by] A difference is relative to the norm of the tensor itself, but at least to a
hundredth of the norm of all tensors together. Some gradients are mathematically zero, such as that of a bias on
attention's keys: they consist of rounding errors, which differ by their own size from one order of summation to the
next. An error elsewhere is still found: in float64, if it is 1e-11 of the whole.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from closeranks.agent.workers.worker_link import WorkerLink
from closeranks.capture.tensors import StateTensor
from closeranks.checkpoint.config import CheckpointConfig
from closeranks.checkpoint.load.resharding_reader import open_newest
from closeranks.checkpoint.save.save_task import SaveSettings
from closeranks.checkpoint.save.saver import CheckpointSaver
from closeranks.core.errors import SetupError
from closeranks.core.events import StepDone
from closeranks.core.pieces import Piece
from closeranks.elastic.vote import Verdict
from closeranks.run.components.component import Component
from closeranks.run.hooks import Hook
from closeranks.run.job.job import Job
from closeranks.run.loop import train_job
from closeranks.run.session import Session
from closeranks.run.worker.agent_client import configure_worker

GRADIENTS, WEIGHTS = "gradients", "weights"
_SUMMARY = "proof.json"
_LEAST_SHARE = 1e-2
"""The norm that a difference is relative to is at least this fraction of the norm of all tensors."""


class _FirstGradients(Component):
    """Calls ``take`` with the factor of the first step's gradients, while these are intact."""

    def __init__(self, take: Callable[[Tensor], None]) -> None:
        self._take: Callable[[Tensor], None] | None = take

    def after_vote(self, index: int, verdict: Verdict) -> None:
        take, self._take = self._take, None
        if take is not None:
            take(verdict.factor)


class LayoutRecord(Hook):
    """Writes a run's losses, first gradients and final weights into a folder that all ranks share."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._steps: list[StepDone] = []

    def on_start(self, session: Session) -> None:
        def write(factor: Tensor) -> None:
            self._write(session, GRADIENTS, _gradients(session, factor))

        session.engine.components.add(_FirstGradients(write))

    def on_step(self, session: Session, step: StepDone) -> None:
        self._steps.append(step)

    def on_end(self, session: Session) -> None:
        self._write(
            session,
            WEIGHTS,
            ((one.piece, one.tensor) for one in session.engine.model.local_tensors() if one.is_primary),
        )
        if session.world.is_lead:
            rows = [{"loss": step.loss, "grad_norm": step.grad_norm, "metrics": step.metrics} for step in self._steps]
            (self._folder / _SUMMARY).write_text(json.dumps(rows))

    def _write(self, session: Session, section: str, pieces: Iterable[tuple[Piece, Tensor]]) -> None:
        world, config = session.world, CheckpointConfig(read_back=False)
        settings = SaveSettings.from_config(config, str(self._folder / section))
        saver = CheckpointSaver(world.rank, world.size, section, 1, str(session.context.layout), settings, config)
        items = [StateTensor(section, piece.name, piece, tensor) for piece, tensor in pieces]
        with closing(saver):
            reports = saver.save_now(len(self._steps), items, {} if world.is_lead else None, None)
        for report in reports:
            if report.kind == "failed":
                raise SetupError(report.what, "Choose another folder.")


def _gradients(session: Session, factor: Tensor) -> Iterator[tuple[Piece, Tensor]]:
    """As the optimizer receives them: divided by the weight of all ranks, and clipped."""
    for shard in session.engine.reducer.parameter_shards():
        if shard.is_primary and shard.tensor.grad is not None:
            yield shard.piece, shard.tensor.grad * factor.to(shard.tensor.grad.dtype)


@dataclass(frozen=True, slots=True)
class LayoutDifference:
    """The difference between two runs in one loss or tensor, zero if there is none."""

    kind: Literal["loss", "gradient", "weight"]
    name: str
    """The tensor, or the step of a loss."""
    relative: float
    """Size of the difference, [Note: what a difference is measured by]; infinite if one run lacks the quantity."""


@dataclass(frozen=True, slots=True)
class LayoutComparison:
    """Two records, quantity by quantity in the order of the model."""

    differences: tuple[LayoutDifference, ...]

    def largest(self, kind: str) -> float:
        return max((one.relative for one in self.differences if one.kind == kind), default=math.inf)

    def first_exceeding(self, tolerances: Mapping[str, float]) -> LayoutDifference | None:
        """The first difference beyond the tolerance of its kind; kinds without a tolerance may differ."""
        beyond = (one for one in self.differences if not one.relative <= tolerances.get(one.kind, math.inf))
        return next(beyond, None)


def compare_records(record: Path, reference: Path) -> LayoutComparison:
    """Losses first, then gradients, then weights: in the order in which an error shows."""
    return LayoutComparison(
        (
            *_compare_losses(record, reference),
            *_compare_tensors("gradient", record / GRADIENTS, reference / GRADIENTS, GRADIENTS),
            *_compare_tensors("weight", record / WEIGHTS, reference / WEIGHTS, WEIGHTS),
        )
    )


def recorded_losses(record: Path) -> list[float]:
    return [row["loss"] for row in json.loads((record / _SUMMARY).read_text())]


def _compare_losses(record: Path, reference: Path) -> Iterator[LayoutDifference]:
    for number, (ours, theirs) in enumerate(
        zip_longest(recorded_losses(record), recorded_losses(reference), fillvalue=math.nan), start=1
    ):
        relative = abs(ours - theirs) / abs(theirs) if theirs else abs(ours)
        yield LayoutDifference("loss", f"step {number}", math.inf if math.isnan(relative) else relative)


def _compare_tensors(
    kind: Literal["gradient", "weight"], record: Path, reference: Path, section: str
) -> Iterator[LayoutDifference]:
    ours, theirs = open_newest(str(record)), open_newest(str(reference))
    found, wanted = ours.shapes(section), theirs.shapes(section)
    tensors = (theirs.read(section, name, Piece.whole(name, shape)) for name, shape in wanted.items())
    floor = _LEAST_SHARE * math.hypot(*(tensor.double().norm().item() for tensor in tensors))
    for name in (*wanted, *(name for name in found if name not in wanted)):
        if found.get(name) != wanted.get(name):
            yield LayoutDifference(kind, name, math.inf)
            continue
        whole = Piece.whole(name, wanted[name])
        both = (side.read(section, name, whole) for side in (ours, theirs))
        yield LayoutDifference(kind, name, relative_difference(*both, floor=floor))


def relative_difference(ours: Tensor, theirs: Tensor, *, floor: float = 0.0) -> float:
    """Of one tensor, by norms in float64; two zeros are equal, a non-finite value is equal to nothing.

    ``floor``: lower bound of the norm that the difference is relative to.
    """
    distance, size = (ours.double() - theirs.double()).norm().item(), theirs.double().norm().item()
    if not math.isfinite(distance):
        return math.inf
    size = max(size, floor)
    return distance / size if size else (0.0 if distance == 0.0 else math.inf)


def record_entry(payload: dict[str, Any], link: WorkerLink) -> int:
    """Worker entry point that trains a job and records it."""
    configure_worker(link=link)
    train_job(Job.model_validate(payload["job"]), Path(payload["folder"]), [LayoutRecord(Path(payload["record"]))])
    return 0
