"""``closeranks plan check``: what was predicted of a run beside what it measured, part by part.

Imports no torch, unless the model is the user's own. Invariant: standard output holds the comparison and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from closeranks.core.events import RunStarted, StepPhases
    from closeranks.facts.cluster import Cluster
    from closeranks.facts.layout import Layout
    from closeranks.plan.check.check import CheckedFigure, PlanCheck
    from closeranks.run.job.job import Job

HELP = """Compare a run with what its plan predicts: the parts of a step, memory, and what ranks send.

\b
  closeranks plan check runs/tiny
  closeranks plan check runs/tiny --calibration mine.json
  closeranks plan check runs/large --cluster cluster.toml --json

The job is planned anew as it was trained, on the devices that the run recorded; --cluster names others, or their links.
Measured is the median step without the first one of each process. Errors are of the prediction, as a share of what was
measured: +10% was predicted too long. The last line says what differs most, and whether `closeranks plan calibrate`
would help. Saves, evaluations and compiling are listed apart: no step of a plan contains them.
"""


def register(app: typer.Typer) -> None:
    app.command("check", help=HELP, short_help="Predicted beside measured, for a run.")(check)


def check(
    run: Annotated[Path, typer.Argument(help="The run's folder.", metavar="RUN")],
    cluster: Annotated[str, typer.Option("--cluster", help="Devices, or a file.", metavar="64xh100|FILE")] = "",
    calibration: Annotated[
        Path | None, typer.Option("--calibration", help="A file of closeranks plan calibrate.", metavar="FILE")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, for programs.")] = False,
) -> None:
    import json

    from closeranks.cli.terminal import safe_echo
    from closeranks.plan.check.check import check_json, check_rows

    found = _checked(run, cluster, calibration)
    if as_json:
        safe_echo(json.dumps({"run": str(run), **check_json(found)}))
        return
    rows = [("", "predicted", "measured", "error"), *check_rows(found)]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for name, *figures in rows:
        cells = [figure.rjust(width) for figure, width in zip(figures, widths[1:], strict=True)]
        safe_echo("  ".join([name.ljust(widths[0]), *cells]))
    if found.unplanned:
        shown = ", ".join(f"{name} {1e3 * seconds:,.1f} ms" for name, seconds in found.unplanned.items())
        safe_echo(f"\nNot part of a plan, on average per step: {shown}")
    for note in found.notes:
        safe_echo(f"\n{note}")
    safe_echo(f"\n{found.sentence()}")


def _checked(run: Path, cluster_text: str, calibration_path: Path | None) -> PlanCheck:
    from closeranks.core.errors import UserError
    from closeranks.facts.layout import Layout
    from closeranks.plan.check.check import check_plan
    from closeranks.plan.check.measured_step import comparable_steps, planned_groups, typical_step
    from closeranks.plan.step_time.estimate import estimate_step
    from closeranks.run.job.job import layout_for, load_job
    from closeranks.run.job.planned import planned_choice, planned_workload
    from closeranks.telemetry.run_log.phase_history import load_phases
    from closeranks.telemetry.run_log.run_folder import RunFolder
    from closeranks.telemetry.run_log.run_history import load_history

    folder = RunFolder(run)
    if not run.is_dir() or not folder.is_run:
        raise UserError(f"{run} is not a run folder", "Name the folder that `closeranks train` printed.")
    history = load_history(run)
    starts = [one.started for one in history.starts]
    times = comparable_steps(starts, load_phases(run).steps, history.first_steps) if starts else {}
    if not times:
        raise UserError(*_without_steps(run, folder.job, has_started=bool(starts)))
    job, started = load_job(folder.job).value, starts[-1]
    layout = Layout.parse(started.layout) if started.layout else layout_for(job, started.world_size)
    cluster = _cluster(cluster_text, started)
    if calibration_path:
        cluster = _calibrated(cluster, calibration_path, "" if cluster_text else started.device)
    choice = replace(planned_choice(job, started.world_size), layout=layout)
    estimate = estimate_step(planned_workload(job), choice, cluster)
    return check_plan(
        planned_groups({part.name: part.seconds for part in estimate.parts}),
        typical_step(times),
        memory=_memory(run, job, layout),
        traffic=_traffic(job, layout, [own[-1] for own in times.values()]),
        is_calibrated=cluster.calibration is not None,
        is_one_host=cluster.num_hosts == 1,
        notes=_notes(job),
    )


def _without_steps(run: Path, job: Path, *, has_started: bool) -> tuple[str, str]:
    """Why a run has nothing to compare, and what to do."""
    from closeranks.run.job.job import load_job

    if not has_started:
        return f"{run} has no measured step to compare: it ended before its first step", "Train it again."
    if not load_job(job).value.telemetry.phases:
        what = f"{run} has no measured step to compare: it was trained with telemetry.phases off"
        return what, "Train a few steps with telemetry.phases=true."
    what = f"{run} has no measured step to compare: the first step of each process and the last do not count"
    return what, "Train a few more steps."


def _notes(job: Job) -> tuple[str, ...]:
    """What the run did that no plan contains."""
    found = []
    if job.sync.local.is_on:
        every = job.sync.local.every
        found.append(f"Replicas exchange once in {every} steps (Local SGD); the plan sums gradients in every step.")
    if job.sync.compress.name != "none":
        found.append(
            f"What is sent is compressed ({job.sync.compress.name}); the plan's time of the data axis is without."
        )
    return tuple(found)


def _cluster(text: str, started: RunStarted) -> Cluster:
    """The one that was named, else as many of the run's device as it had workers."""
    from closeranks.core.errors import ConfigError, Problem, UserError
    from closeranks.facts.cluster import find_cluster, parse_cluster
    from closeranks.facts.devices import is_cpu

    count, device = started.world_size, "cpu" if is_cpu(started.device) else started.device
    if not text:
        try:
            return parse_cluster(f"{count}x{device}")
        except ConfigError as error:
            what = f"no plan knows the device '{device}' of this run"
            raise UserError(what, "Name a cluster file with --cluster (docs/plan-models.md).") from error
    found = find_cluster(text)
    if found.num_devices != count:
        what = f"the cluster has {found.num_devices} devices, and the run had {count} workers"
        raise ConfigError([Problem("--cluster", what, f"Name one of {count}.")])
    return found


def _calibrated(cluster: Cluster, path: Path, device: str) -> Cluster:
    """``device``: on which the run trained; empty if a cluster was named instead."""
    from closeranks.core.errors import UserError
    from closeranks.facts.calibration import load_calibration
    from closeranks.facts.cluster import calibrated

    found = load_calibration(path)
    if device and found.device and found.device != device:
        what = f"the calibration {path} was measured on '{found.device}', and the run trained on '{device}'"
        raise UserError(what, "Measure where it trained: closeranks plan calibrate.")
    return calibrated(cluster, found)


def _memory(run: Path, job: Job, layout: Layout) -> tuple[CheckedFigure, ...]:
    """Of the rank that holds most: its state by kind, and on an accelerator its peak."""
    from closeranks.plan.check.check import CheckedFigure
    from closeranks.plan.layouts import layout_cost
    from closeranks.run.job.describe import describe_job
    from closeranks.telemetry.run_log.resource_history import load_resources

    measured = load_resources(run).memory
    if not measured:
        return ()
    fullest = layout_cost(describe_job(job), layout).fullest
    rows = []
    for kind in ("parameters", "gradients", "optimizer"):
        most = max(used.kinds.get(kind, 0) for used in measured.values())
        if planned := getattr(fullest.state, kind):
            rows.append(CheckedFigure(kind, planned, most))
    if any("activations" in used.kinds for used in measured.values()):
        rows.append(CheckedFigure("peak", fullest.total_bytes, max(used.peak_bytes for used in measured.values())))
    return tuple(rows)


def _traffic(job: Job, layout: Layout, last_step: Sequence[StepPhases]) -> tuple[CheckedFigure, ...]:
    """Of the rank that sends most on each axis, in a step."""
    from closeranks.plan.check.check import CheckedFigure
    from closeranks.plan.layouts import layout_cost
    from closeranks.run.job.describe import describe_job

    cost = layout_cost(describe_job(job), layout)
    rows = []
    for axis, names in (("data", ("data", "shard", "replica")), ("tensor", ("tensor",)), ("pipeline", ("pipeline",))):
        planned = max(rank.sent_on(*names) for rank in cost.ranks)
        sent = [
            sum(size for name, size in own.sent_bytes.items() if name.partition(".")[0] in names) for own in last_step
        ]
        if planned or any(sent):
            rows.append(CheckedFigure(f"{axis} axis", planned, max(sent)))
    return tuple(rows)
