"""What a rank of a real run sends and holds in one step, counted where torch hands operations to their backends."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from closeranks import Hook, Session
from closeranks.core.events import StepDone
from closeranks.run.components.optimizer import OptimizerStep
from closeranks.run.dry_run.live_bytes import LiveBytes
from closeranks.run.job.job import Job, load_job
from closeranks.run.loop import train_job
from closeranks.sync.reducers.fully_sharded import local_of

_SUMMED = ("allreduce_", "all_reduce")
_GATHERED = ("_allgather_base_", "all_gather_into_tensor")
_SCATTERED = ("_reduce_scatter_base_", "reduce_scatter_tensor")
Counts = dict[str, tuple[int, int]]
"""By operation: calls, and bytes of the whole tensors they are about."""


class _Ear(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, _, name = func._schema.name.partition("::")
        if space in ("c10d", "_c10d_functional"):
            self._hear(space, name, args)
        return func(*args, **(kwargs or {}))

    def _hear(self, space: str, name: str, args: Any) -> None:
        if name in _SUMMED:
            self._count("all-reduce", args[0])
        elif name in _GATHERED:
            times = args[1] if space == "_c10d_functional" else 1
            self._count("all-gather", args[0], times)
        elif name in _SCATTERED:
            self._count("reduce-scatter", args[0] if space == "_c10d_functional" else args[1])
        elif name == "send":
            self._count("send", args[0])
        elif name not in ("recv_", "wait_tensor"):
            self._count(name, args[0])

    def _count(self, operation: str, tensors: Any, times: int = 1) -> None:
        listed = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        self.calls[operation] += 1
        self.bytes[operation] += times * sum(tensor.numel() * tensor.element_size() for tensor in listed)


class _Counting(Hook):
    """Listens to every step but the first, which also exchanges forms."""

    def __init__(self) -> None:
        self._ear = _Ear()
        self.found: Counts = {}

    def on_step(self, session: Session, step: StepDone) -> None:
        if step.step == 1:
            self._ear.__enter__()
        elif step.step == 2:
            self._ear.__exit__(None, None, None)
            self.found = {name: (self._ear.calls[name], self._ear.bytes[name]) for name in self._ear.calls}


def step_counts(job_file: str, overrides: list[str], folder: str) -> Counts:
    """On every rank: what the second step of a job sends."""
    counting = _Counting()
    train_job(_short(job_file, overrides), Path(folder), [counting])
    return counting.found


class _Weighing(Hook):
    """Watches how many bytes live from the first step's end to the second's."""

    def __init__(self) -> None:
        self._live = LiveBytes()
        self.peak = 0

    def on_start(self, session: Session) -> None:
        optimizer = session.engine.components.get(OptimizerStep).optimizer
        memory = (tensor for _, _, tensor in optimizer.state_tensors())
        self._live.__enter__()
        self._live.watch(map(local_of, (*session.model.parameters(), *session.model.buffers())))
        self._live.watch([*memory, *session.engine.reducer.gradients()])

    def on_step(self, session: Session, step: StepDone) -> None:
        if step.step == 1:
            self._live.rest()
        self.peak = self._live.peak

    def on_end(self, session: Session) -> None:
        self._live.__exit__(None, None, None)


def step_peak(job_file: str, overrides: list[str], folder: str) -> int:
    """On every rank: the most bytes that live at once in the second step of a job."""
    weighing = _Weighing()
    train_job(_short(job_file, overrides), Path(folder), [weighing])
    return weighing.peak


def _short(job_file: str, overrides: list[str]) -> Job:
    alone = ["train.steps=2", "train.eval_samples=1", "checkpoint.save=false", "telemetry.report=false"]
    return load_job(Path(job_file), [*overrides, *alone]).value
