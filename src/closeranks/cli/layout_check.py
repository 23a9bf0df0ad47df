"""Checks from the command line that a layout trains the same model as one process.

Trains a few steps in one process and under the layout, in float64 and float32, and prints how far they differ. The
workers are real processes under the agent; this process imports torch only to compare what they wrote.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from closeranks.agent.agent import Agent
from closeranks.cli.layout_list import split_words, with_layout
from closeranks.core.errors import ConfigError, RunFailed
from closeranks.facts.layout import Layout
from closeranks.run.job.job import Job, check_axes, check_workers, layout_for, load_job
from closeranks.run.job.launch import add_job_folder_to_path, make_launch_plan, user_modules
from closeranks.run.job.paths import resolve_paths
from closeranks.telemetry.config import TelemetryConfig

if TYPE_CHECKING:
    from closeranks.run.layout_check import LayoutComparison, LayoutDifference

TOLERANCES: dict[str, dict[str, float]] = {
    "float64": {"loss": 1e-9, "gradient": 1e-9, "weight": 1e-9},
    # Float32 weights are not judged: Adam divides a tiny gradient by its own size, which amplifies rounding.
    "float32": {"loss": 1e-5, "gradient": 1e-5},
}
_KINDS = {"loss": "losses", "gradient": "first gradients", "weight": "last weights"}


@dataclass(frozen=True, slots=True)
class LayoutCheckResult:
    """The comparison in one precision, and the first difference beyond its tolerance, if any."""

    precision: str
    comparison: LayoutComparison
    first: LayoutDifference | None


def check_layout(path: Path, words: Sequence[str], precisions: Sequence[str], steps: int) -> None:
    text, overrides = split_words(words)
    job = with_layout(resolve_paths(load_job(path, overrides).value, path), text)
    add_job_folder_to_path(path)
    layout = layout_for(job, 1)
    if problems := [*check_axes(job), *check_workers(job, layout.num_ranks)]:
        raise ConfigError(problems)
    console = Console(highlight=False, soft_wrap=True)
    with tempfile.TemporaryDirectory(prefix="closeranks-check-") as folder:
        results = [_compare(job, layout, precision, steps, Path(folder), console) for precision in precisions]
    console.print(_table(results))
    for result in results:
        if result.first is not None:
            raise RunFailed(_difference_text(layout, result))
    console.print(f"{layout} trains the same model as one process.")


def short_job(job: Job, precision: str, steps: int) -> Job:
    """The job cut to a few steps, without evaluations, checkpoints, reports, sinks and hooks."""
    tables = {
        "train": {"steps": steps, "epochs": None, "precision": precision, "eval_every": 0, "eval_samples": 1},
        "checkpoint": {"save": False, "resume": ""},
        "run": {"hooks": (), "deterministic": True},
    }
    changed = {name: getattr(job, name).model_copy(update=keys) for name, keys in tables.items()}
    return job.model_copy(update={**changed, "telemetry": TelemetryConfig(report=False)})


def single_process_job(job: Job) -> Job:
    """The same job in one process."""
    plain = {"data": 1, "zero": 0, "shard": 0, "tensor": 1, "pipeline": 1, "schedule": "1f1b"}
    return job.model_copy(update={"layout": job.layout.model_copy(update=plain)})


def _compare(job: Job, layout: Layout, precision: str, steps: int, folder: Path, console: Console) -> LayoutCheckResult:
    short = short_job(job, precision, steps)
    sides = {
        "one process": (single_process_job(short), 1),
        f"{layout} on {layout.num_ranks} workers": (short, layout.num_ranks),
    }
    records = []
    for number, (name, (side, num_workers)) in enumerate(sides.items()):
        console.print(f"{precision}: {steps} steps, {name} ...")
        records.append(folder / f"{precision}-{number}")
        _record(side, num_workers, records[-1])
    from closeranks.run.layout_check import compare_records

    comparison = compare_records(records[1], records[0])
    return LayoutCheckResult(precision, comparison, comparison.first_exceeding(TOLERANCES[precision]))


def _record(job: Job, num_workers: int, record: Path) -> None:
    run = record / "run"
    plan = make_launch_plan(
        entry="closeranks.run.layout_check:record_entry",
        payload={"job": job.model_dump(mode="json"), "folder": str(run), "record": str(record)},
        folder=run,
        preload=user_modules(job),
        agent=job.agent,
        threads=job.run.threads,
        num_workers=num_workers,
    )
    Agent(plan, on_event=lambda rank, event: None, on_output=lambda rank, text: None, on_note=lambda text: None).run()


def _table(results: Sequence[LayoutCheckResult]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("relative difference", *_KINDS.values(), ""):
        table.add_column(title, justify="right" if title in _KINDS.values() else "left", no_wrap=True)
    for result in results:
        allowed = TOLERANCES[result.precision]
        cells = [f"{result.comparison.largest(kind):.1e}{'' if kind in allowed else ' *'}" for kind in _KINDS]
        verdict = f"within {allowed['loss']:.0e}" if result.first is None else "DIFFERENT"
        table.add_row(result.precision, *cells, verdict)
    if any(kind not in TOLERANCES[result.precision] for result in results for kind in _KINDS):
        table.caption = "* not judged: Adam divides a tiny gradient by its own size, so rounding grows in weights"
        table.caption_justify = "left"
    return table


def _difference_text(layout: Layout, result: LayoutCheckResult) -> str:
    first = result.first
    assert first is not None
    allowed = TOLERANCES[result.precision][first.kind]
    what = {"loss": f"the loss of {first.name}", "gradient": f"the gradient of '{first.name}'"}
    named = what.get(first.kind, f"the weight '{first.name}'")
    return (
        f"{layout} does not train the same model in {result.precision}: the first to differ is {named}, "
        f"by {first.relative:.1e} (allowed {allowed:.0e})"
    )
