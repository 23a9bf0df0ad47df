"""``closeranks plan dry-run``: one rank of a job at its real world size, on tensors without data.

Imports torch, but nothing before the options are checked. Invariant: standard output holds the result and nothing else,
so that ``--json`` can be piped; progress goes to standard error.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from closeranks.run.dry_run.dry_run import Comparison, DryRun

HELP = """Run one rank of a job at any number of ranks, without memory, data or network: what does it hold and send?

\b
  closeranks plan dry-run job.toml --ranks 1024
  closeranks plan dry-run job.toml --ranks 1024 layout="zero=3 tensor=8"
  closeranks plan dry-run job.toml --ranks 64 layout="tensor=2 pipeline=4" --rank 63
  closeranks plan dry-run job.toml --ranks 8 train.precision=bf16 --json

The real model, layout, reducer, optimizer and pipeline run one step on fake tensors in a fake process group, and every
byte that lives or is sent is counted, beside what the planner computes in closed form. Takes seconds for a small model,
minutes for the largest. What it shows and what it leaves out: docs/plan-dry-run.md.
"""


def register(app: typer.Typer) -> None:
    app.command("dry-run", help=HELP, short_help="Run one rank without memory; count what it holds and sends.")(dry_run)


def dry_run(
    job: Annotated[Path, typer.Argument(help="The job file.", metavar="JOB.toml")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help='layout="...", or table.key=value, over the job file.', metavar="[KEY=VALUE]"),
    ] = None,
    ranks: Annotated[int, typer.Option("--ranks", "-n", min=1, max=1_000_000, help="Ranks of the run.")] = 8,
    rank: Annotated[
        int | None, typer.Option(min=0, help="Which of them to run.  [default: one of those that hold the most]")
    ] = None,
    micro_batches: Annotated[
        int, typer.Option(min=0, help="At most so many of the step; 0: two, or enough to fill the pipeline twice.")
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Everything as JSON, for programs.")] = False,
) -> None:
    from closeranks.cli.layout_list import split_words, with_layout
    from closeranks.run.job.job import load_job

    text, changes = split_words(overrides or [])
    loaded = with_layout(load_job(job, changes).value, text, ranks)

    from closeranks.run.dry_run.dry_run import dry_run as run_dry

    found = run_dry(loaded, ranks, rank=rank, num_micro=micro_batches, report=_report)
    if as_json:
        _print_json(found)
    else:
        _print(found, job.name)


def _report(line: str) -> None:
    typer.echo(f"  {line} ...", err=True)


def _print(found: DryRun, name: str) -> None:
    from closeranks.plan.layout_text import ByteUnit
    from closeranks.telemetry.terminal_table import print_table, stdout

    console, layout = stdout(), found.layout
    where = f", pipeline {found.pipeline_rank}" if layout.pipeline > 1 else ""
    micro = f"{found.num_micro} micro-batch{'' if found.num_micro == 1 else 'es'}"
    console.print(
        f"{name}: {layout}, rank {found.rank} of {layout.num_ranks:,}{where}, a step of {micro}", soft_wrap=True
    )
    header = ["", "closed form", "dry run", "difference"]
    unit = ByteUnit.for_largest(found.peak.dry)
    rows = [[part.name, unit.text(part.closed), unit.text(part.dry), _percent(part)] for part in found.memory]
    console.print(f"\nMemory of the rank, {unit.name}")
    print_table(header, rows, right=header[1:])
    if found.traffic:
        unit = ByteUnit.for_largest(max(max(row.sent_bytes.dry, row.sent_bytes.closed) for row in found.traffic))
        console.print(f"\nSent by the rank in the step, {unit.name}")
        print_table(
            [*header, "calls"], [_traffic_cells(row, unit) for row in found.traffic], right=[*header[1:], "calls"]
        )
    for note in found.notes:
        console.print(f"\n{note}", soft_wrap=not console.is_terminal)


def _traffic_cells(row: Any, unit: Any) -> list[str]:
    sent = row.sent_bytes
    what = f"{row.operation} over {row.num_ranks:,} {row.axis} ranks"
    return [what, unit.text(sent.closed), unit.text(sent.dry), _percent(sent), f"{row.calls.dry:,}"]


def _percent(found: Comparison) -> str:
    return "-" if found.difference is None else f"{100 * found.difference:+.1f}%"


def _print_json(found: DryRun) -> None:
    import json
    from dataclasses import asdict

    def figures(part: Comparison) -> dict[str, Any]:
        return {"closed_form": part.closed, "dry_run": part.dry, "difference": part.difference}

    traffic = [
        {
            "axis": row.axis,
            "operation": row.operation,
            "num_ranks": row.num_ranks,
            "calls": figures(row.calls),
            "sent_bytes": figures(row.sent_bytes),
        }
        for row in found.traffic
    ]
    tables = {
        "layout": asdict(found.layout),
        "num_ranks": found.layout.num_ranks,
        "rank": found.rank,
        "pipeline_rank": found.pipeline_rank,
        "num_micro": found.num_micro,
        "memory_bytes": {part.name: figures(part) for part in found.memory},
        "traffic": traffic,
        "notes": list(found.notes),
        "seconds": round(found.seconds, 3),
    }
    print(json.dumps(tables, indent=1))
