"""Which steps of a job does a calibration train, and what do they take?

On a CPU every run is trained in several passes, in another order each, and the median counts: neighbours on a virtual
machine make it slower for half a minute at a time, which would bend whatever is fitted to the one run that they met.
Invariant: a run that fails costs itself alone, and is told.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path

from closeranks.core.errors import UserError
from closeranks.facts.calibration import Calibration
from closeranks.facts.cluster import parse_cluster
from closeranks.facts.layout import Layout
from closeranks.lab.calibrate.corrections import TrainedSteps
from closeranks.lab.calibrate.job_steps import StepRun, StepRunFailed, measure_run, run_steps
from closeranks.plan.check.measured_step import StepGroups, middle_step
from closeranks.run.job.job import load_job
from closeranks.run.job.planned import planned_choice

_PASSES, _PASSES_S = 3, 45.0
"""No further pass begins that is not likely to end within this time."""
_CPU_STEPS, _GPU_STEPS = 6, 16


def calibration_runs(job: Path, device_type: str, num_cores: int) -> tuple[StepRun, ...]:
    """Two sizes of micro-batch; on a CPU by one worker alone, and by two that share the data or the matrices."""
    micro = planned_choice(load_job(job).value, 1).micro_batch
    small = max(1, micro // 2) if device_type == "cuda" else micro
    large = micro if device_type == "cuda" else 2 * micro
    two = min(2, num_cores) if device_type == "cpu" else 1
    sizes = dict.fromkeys([(1, small), (two, small), (two, large)])
    runs = [_step_run(job, device_type, Layout(workers), size) for workers, size in sizes]
    if two > 1:
        runs.append(_step_run(job, device_type, Layout(tensor=two), large))
    return tuple(runs)


def _step_run(job: Path, device_type: str, layout: Layout, micro_batch: int) -> StepRun:
    batch = (f"train.micro_batch={micro_batch}", f"train.global_batch={2 * micro_batch * layout.data}")
    how = ("train.recompute=none", f"run.device={device_type}")
    # Every axis by name: the job may have chosen others.
    axes = " ".join(f"{axis.name}={getattr(layout, axis.name)}" for axis in fields(layout))
    num_steps = _CPU_STEPS if device_type == "cpu" else _GPU_STEPS
    return StepRun(job, (f"layout={axes}", *batch, *how), layout.num_ranks, num_steps)


def trained_steps(
    runs: Sequence[StepRun], calibration: Calibration, say: Callable[[str], None]
) -> tuple[TrainedSteps, ...]:
    is_cpu = calibration.kind == "cpu"
    measured: dict[StepRun, list[StepGroups]] = {run: [] for run in runs}
    began_at, num_passes = time.monotonic(), _PASSES if is_cpu else 1
    for number in range(num_passes):
        for run in (*runs[number:], *runs[:number]):
            _measure(run, measured, is_cpu, say)
        measured = {run: steps for run, steps in measured.items() if steps}
        if (time.monotonic() - began_at) * (number + 2) / (number + 1) > _PASSES_S:
            break
    name = "cpu" if is_cpu else calibration.device
    return tuple(
        TrainedSteps(run.workload(), run.choice(), parse_cluster(f"{run.num_workers}x{name}"), middle_step(steps))
        for run, steps in measured.items()
    )


def _measure(run: StepRun, measured: dict[StepRun, list[StepGroups]], is_cpu: bool, say: Callable[[str], None]) -> None:
    """Adds what was measured; a run that is not among them has failed before."""
    if run not in measured:
        return
    try:
        choice = run.choice()
        say(f"steps of {run.job.name}, {choice.layout}, micro-batch {choice.micro_batch}")
        measured[run].append(run_steps(run) if is_cpu else measure_run(run).step)
        say(f"  {1e3 * measured[run][-1].seconds:.0f} ms a step")
    except (StepRunFailed, UserError) as error:
        say(f"not measured: {error}")
