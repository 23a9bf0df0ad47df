"""Runs a comparison, from its file to its recommendation. It can also be called from Python:

    result = run_comparison(Path("compare.toml"))
    result.advice, result.tables[0].rows, result.outcomes

Invariants: nothing runs before everything was checked; every run is recorded; the folder belongs to this comparison
alone until the report is written. Imports no torch.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

import typer

from closeranks.core.errors import SetupError
from closeranks.core.system.environment import detect_world
from closeranks.lab.compare.advice import advise_all
from closeranks.lab.compare.comparison_plan import ComparisonRun, make_plan
from closeranks.lab.compare.config import load_compare
from closeranks.lab.compare.report import ComparisonResult, outcome_line, print_result, write_report
from closeranks.lab.compare.result_table import make_tables
from closeranks.lab.compare.run_environment import choose_environments
from closeranks.lab.compare.run_outcome import ComparisonRunOutcome, read_outcome
from closeranks.lab.compare.run_records import ComparisonRunFolder, RunRecord, failed_runs
from closeranks.lab.compare.runner import run_all
from closeranks.run.job.ownership import owned_folder


def run_comparison(file: Path, overrides: Sequence[str] = (), *, retry: bool = False) -> ComparisonResult:
    """Run the whole comparison; write, print and return its result."""
    if detect_world().launcher in ("torchrun", "slurm"):
        raise SetupError("`closeranks compare` starts its own workers", "Start it without torchrun or srun.")
    compare = load_compare(file, overrides)
    plan = make_plan(compare, file)
    environments = choose_environments(plan)
    not_counted_reason = next((one.not_counted_reason for one in environments.values() if one.not_counted_reason), "")
    if not_counted_reason:
        typer.echo(f"Bytes are not measured: {not_counted_reason}.")
    outcomes: list[ComparisonRunOutcome] = []

    def on_done(run: ComparisonRun, run_folder: ComparisonRunFolder, record: RunRecord) -> str:
        outcomes.append(read_outcome(compare, run, run_folder, record))
        return outcome_line(outcomes[-1])

    with owned_folder(plan.folder, "a comparison"):
        if retry:
            for run_folder in failed_runs(plan):
                run_folder.clear()
        run_all(plan, environments, on_done)
        tables = make_tables(compare, outcomes)
        command = shlex.join(["closeranks", "compare", str(file), *overrides])
        result = ComparisonResult(plan, tuple(outcomes), tables, advise_all(tables), not_counted_reason, command)
        files = write_report(result)
    typer.echo()
    print_result(result)
    typer.echo(f"\n{result.advice}\nwritten to {', '.join(str(path) for path in files)}")
    return result
