"""Runs a drill: the job undisturbed, then again with faults, and compares both runs.

Invariants: both runs are the same job, deterministic, with a snapshot of the state after every step; whatever a fault
set up is removed when a drill returns or raises. Imports no torch, since the agent runs in this process.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import typer

from closeranks.core.errors import CloseranksError, ConfigError, Drained, Interrupted, SetupError, UserError
from closeranks.core.system.environment import detect_world
from closeranks.elastic.faults.campaign import draw_campaign
from closeranks.elastic.faults.fault import KINDS, InjectedFault, check_faults
from closeranks.elastic.faults.grammar import ParsedFaults, parse_faults
from closeranks.elastic.faults.inject import Injector
from closeranks.elastic.faults.requirements import unavailable_kinds
from closeranks.lab.drills.fault_results import DrillResult, fault_results, is_resized
from closeranks.lab.drills.recorded_run import (
    TOLERANCE,
    RecordedRun,
    read_recorded_run,
    same_losses,
    same_samples,
    state_difference,
)
from closeranks.lab.drills.report import print_summary, write_report
from closeranks.run.job import launch
from closeranks.run.job.job import Job, check_workers, load_job
from closeranks.run.job.run_folder import choose_folder, make_unused_folder
from closeranks.telemetry.run_log.run_folder import RunFolder

_FIRST_S, _FIRST_FACTOR = 20.0, 5.0
_SLOW_STEPS = 3
"""``elastic.slow_steps`` of a drill, in which a worker is slow for a few steps only."""
_SAVE_EVERY = 2
"""Steps between saves if a full disk is among the faults: a save must hit it."""


@dataclass(frozen=True, slots=True)
class DrillRequest:
    """The job of a drill, and the faults to inject."""

    path: Path
    overrides: tuple[str, ...]
    num_workers: int
    asked: ParsedFaults
    count: int
    """Faults of the campaign; 0: one of each kind."""
    seed: int
    folder: str = ""
    command: str = ""


def possible_kinds(num_workers: int) -> tuple[ParsedFaults, dict[str, str]]:
    """Every kind that is possible here, and why the others are not."""
    kinds = [name for name, kind in KINDS.items() if kind.num_ranks <= num_workers]
    without = unavailable_kinds(kinds)
    return ParsedFaults(kinds=tuple(name for name in kinds if name not in without)), without


def run_drill(request: DrillRequest) -> bool:
    """Whether every fault was survived, and the run is equal to the one that never failed."""
    job, num_workers = _prepare(request)
    folder = make_unused_folder(Path(request.folder or Path("runs") / f"drill-{request.path.stem}"))
    try:
        return _drill_in(folder, request, job, num_workers)
    finally:
        with suppress(OSError):
            folder.rmdir()  # only if it is empty


def _drill_in(folder: Path, request: DrillRequest, job: Job, num_workers: int) -> bool:
    started_at = time.monotonic()
    settings = _settings(request, folder / "undisturbed")
    typer.echo(f"1/2 undisturbed: {folder / 'undisturbed'}")
    launch.train(request.path, settings, num_workers)
    undisturbed = read_recorded_run(folder / "undisturbed")
    faults = _faults(request, undisturbed.last_step, num_workers)
    typer.echo(f"\n2/2 with {len(faults)} faults: {folder / 'disturbed'}")
    for fault in faults:
        typer.echo(f"  {fault}")
    with Injector(faults, RunFolder(folder / "disturbed").checkpoints) as injector:
        settings = [_first_step_limit(undisturbed), *_settings(request, folder / "disturbed")]
        failure = _train(request.path, settings, num_workers, injector)
    summary = _compare(folder, undisturbed, injector, failure, num_workers, TOLERANCE[job.train.precision])
    facts = {"job": str(request.path), "num_workers": num_workers, "seed": request.seed, "command": request.command}
    facts |= {"faults": [str(fault) for fault in faults], "seconds": round(time.monotonic() - started_at, 3)}
    write_report(folder, summary, facts)
    typer.echo()
    print_summary(summary)
    typer.echo(f"\n{summary.sentence}\nwritten to {folder / 'drill.md'} and {folder / 'drill.json'}")
    return summary.has_passed


def _prepare(request: DrillRequest) -> tuple[Job, int]:
    """Refuse everything that can be refused before an hour is spent on the first run."""
    if detect_world().launcher in ("torchrun", "slurm"):
        raise SetupError("`closeranks drill` starts its own workers", "Start it without torchrun or srun.")
    job = load_job(request.path, request.overrides).value
    num_workers = launch.num_workers_for(job, request.num_workers)
    if problems := check_workers(job, num_workers):
        raise ConfigError(problems)
    if not job.elastic.enabled:
        raise UserError("elastic.enabled is false: this job survives no fault", "Remove elastic.enabled.")
    if job.train.steps is not None and not job.checkpoint.resume:
        _faults(request, job.train.steps, num_workers)
    else:
        check_faults(request.asked.faults, num_workers)
    kinds = (*request.asked.kinds, *(fault.kind for fault in request.asked.faults))
    for kind, reason in unavailable_kinds(kinds).items():
        raise SetupError(f"the fault {kind} is not possible here: {reason}", "Leave it out of --faults.")
    return job, num_workers


def _faults(request: DrillRequest, num_steps: int, num_workers: int) -> list[InjectedFault]:
    """The faults given in full, and those drawn for the campaign."""
    asked = request.asked
    faults = list(asked.faults)
    if asked.kinds:
        faults += draw_campaign(asked.kinds, request.count or len(asked.kinds), request.seed, num_steps, num_workers)
    check_faults(faults, num_workers, num_steps)
    return sorted(faults, key=lambda fault: fault.step)


def _settings(request: DrillRequest, folder: Path) -> list[str]:
    """Defaults of a drill, then the user's overrides, then what the comparison of both runs requires."""
    asked = request.asked
    num_faults = 2 * (len(asked.faults) + max(request.count, len(asked.kinds))) + 10
    is_full = "diskfull" in (*asked.kinds, *(fault.kind for fault in asked.faults))
    return [
        *(f"elastic.{name}={num_faults}" for name in ("max_faults", "max_host_faults", "max_repeats")),
        f"elastic.slow_steps={_SLOW_STEPS}",
        *([f"checkpoint.every={_SAVE_EVERY}"] if is_full else []),
        *request.overrides,
        "run.deterministic=true",
        "elastic.snapshot_every=1",
        "checkpoint.save=true",
        'checkpoint.folder=""',
        'checkpoint.remote=""',
        f"run.folder={folder}",
    ]


def _first_step_limit(undisturbed: RecordedRun) -> str:
    """A shorter limit for first steps, from the undisturbed run, so that a hang in one is detected sooner."""
    return f"elastic.first_s={max(_FIRST_S, _FIRST_FACTOR * undisturbed.longest_s):.1f}"


def _train(path: Path, settings: Sequence[str], num_workers: int, injector: Injector) -> str:
    """Why the run did not finish; empty if it did. A stop from outside ends the whole drill."""
    try:
        launch.train(path, settings, num_workers, on_tick=injector)
    except Interrupted:
        raise
    except Drained as error:
        if not any(injection.fault.kind == "term" for injection in injector.injections):
            raise
        return str(error)
    except CloseranksError as error:
        return str(error)
    return ""


def _compare(
    folder: Path, undisturbed: RecordedRun, injector: Injector, failure: str, num_workers: int, tolerance: float
) -> DrillResult:
    disturbed = read_recorded_run(folder / "disturbed")
    tolerance = tolerance if is_resized(disturbed.events, num_workers) else 0.0
    state = state_difference(folder / "undisturbed", folder / "disturbed", tolerance) if not failure else ""
    return DrillResult(
        rows=tuple(
            fault_results(
                injector.injections,
                injector.missed,
                undisturbed,
                disturbed,
                has_finished=not failure,
                tolerance=tolerance,
            )
        ),
        num_steps=undisturbed.last_step,
        losses=not failure
        and same_losses(undisturbed, disturbed, min(undisturbed.losses, default=1), undisturbed.last_step, tolerance),
        state=state,
        samples=same_samples(undisturbed, disturbed),
        tolerance=tolerance,
        failure=failure,
    )


def train_with_faults(
    path: Path, overrides: Sequence[str], num_workers: int, text: str, hosts: launch.JobHosts | None = None
) -> None:
    """``closeranks train --faults``: train the job, and inject the given faults on this host."""
    asked = parse_faults(text)
    if asked.kinds:
        what = f"`{asked.kinds[0]}` does not say which rank and step"
        raise UserError(what, f"Write {asked.kinds[0]}(rank=1, step=3), or let `closeranks drill` choose.")
    job = load_job(path, overrides).value
    check_faults(asked.faults, launch.num_workers_for(job, num_workers), job.train.steps)
    checkpoints = RunFolder(choose_folder(job, path.stem)).checkpoints
    with Injector(asked.faults, checkpoints) as injector:
        launch.train(path, overrides, num_workers, on_tick=injector, hosts=hosts)
    for injection in injector.injections:
        if injection.error:
            typer.echo(f"{injection.fault} could not be injected: {injection.error}", err=True)
    for fault in injector.missed:
        typer.echo(f"{fault} was not injected: the run was over", err=True)
