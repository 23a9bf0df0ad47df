"""Trains a few steps of a job and says where their time went: what operations measured alone do not show.

Each run is a session in a folder that is removed: of workers that are forked here, which start within a second or two,
or of a ``closeranks train`` of its own, which takes ten. Invariant: a run that fails is reported with its last line,
and leaves nothing running.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from closeranks.core.errors import UserError
from closeranks.core.system.linux import die_with_parent
from closeranks.plan.check.measured_step import StepGroups, typical_step
from closeranks.plan.step_time.workload import PlanChoice, Workload
from closeranks.run.diagnosis import load_facts
from closeranks.run.job.job import Job, load_job
from closeranks.run.job.planned import planned_choice, planned_workload
from closeranks.run.loop import train_job
from closeranks.telemetry.run_log.resource_history import load_resources
from closeranks.testing.world import WorldError, run_world

_QUIET = (
    "checkpoint.save=false",
    "telemetry.report=false",
    "telemetry.sample_s=0",
    "elastic.enabled=false",
    "train.eval_every=0",
    "train.eval_samples=1",
)
_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class StepRun:
    """A job with changes, on some workers."""

    job: Path
    overrides: tuple[str, ...]
    num_workers: int
    num_steps: int = 16
    """The first and the last do not count."""

    def load(self) -> Job:
        return load_job(self.job, self.all_overrides).value

    @property
    def all_overrides(self) -> tuple[str, ...]:
        return (*_QUIET, f"train.steps={self.num_steps}", *self.overrides)

    def workload(self) -> Workload:
        return planned_workload(self.load())

    def choice(self) -> PlanChoice:
        return planned_choice(self.load(), self.num_workers)


class StepRunFailed(Exception):
    """Says why a run gave no steps: a signal to the caller, who goes on without it."""


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    step: StepGroups
    peak_bytes: int
    """Allocated on an accelerator by the rank that holds most; 0 if it was not recorded."""


def run_steps(run: StepRun) -> StepGroups:
    """In forked workers on a CPU, which share its cores evenly, as those of a command do."""
    with tempfile.TemporaryDirectory(prefix="closeranks-steps-") as folder:
        target = Path(folder) / "run"
        try:
            job = run.load()
            threads = job.run.threads or max(1, len(os.sched_getaffinity(0)) // run.num_workers)
            job = job.model_copy(update={"run": job.run.model_copy(update={"threads": threads})})
            run_world(_train, run.num_workers, job.model_dump(mode="json"), target, timeout_s=_TIMEOUT_S)
        except (UserError, WorldError) as error:
            raise StepRunFailed((str(error).strip() or "nothing was said").splitlines()[-1]) from error
        facts = load_facts(target)
    if not facts.num_steps:
        raise StepRunFailed("it recorded no steps")
    return typical_step(facts.times)


def _train(job: dict[str, Any], folder: Path) -> None:
    train_job(Job.model_validate(job), folder)


def measure_run(run: StepRun, environment: Sequence[str] = ()) -> MeasuredRun:
    """By ``closeranks train``, with memory where the job samples resources (``telemetry.sample_s``). ``environment``:
    ``NAME=VALUE`` that the run gets on top of this process's."""
    with tempfile.TemporaryDirectory(prefix="closeranks-steps-") as folder:
        target = Path(folder) / "run"
        command = [sys.executable, "-m", "closeranks", "train", str(run.job), "-n", str(run.num_workers)]
        command += [*run.all_overrides, f"run.folder={target}"]
        try:
            done = subprocess.run(
                ["env", *environment, *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=_TIMEOUT_S,
                preexec_fn=partial(die_with_parent, os.getpid()),
            )
        except subprocess.TimeoutExpired:
            raise StepRunFailed(f"{run.num_steps} steps took more than {_TIMEOUT_S:.0f} s") from None
        if done.returncode:
            raise StepRunFailed((done.stdout.strip() or "nothing was printed").splitlines()[-1])
        facts, memory = load_facts(target), load_resources(target).memory
    if not facts.num_steps:
        raise StepRunFailed("it recorded no steps")
    return MeasuredRun(typical_step(facts.times), max((used.peak_bytes for used in memory.values()), default=0))
