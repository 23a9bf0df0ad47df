"""``closeranks data assign``: shows which rank reads which samples at a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from closeranks.cli.data.job_data import JobData
    from closeranks.cli.data.rank_samples import RankSamples

HELP = """Show which data rank reads which samples at a step, and what changes with another number of workers.

\b
  closeranks data assign -n 8                        job.toml in this folder, its first step
  closeranks data assign -n 8 examples/tiny.toml --step 40
  closeranks data assign -n 8 -n 3 job.toml --step 40        resumed by three: the same samples, other ranks
  closeranks data assign -n 4 job.toml train.global_batch=12 --json

Positions count all samples that the run reads, from 0; which sample is at a position depends on the job alone,
so a step has the same samples for any number of workers and after any resume. Steps count from 1, as in `train`. Ranks
that hold parts of one model (tensor, pipeline) read the same samples and are one data rank.
"""
_MAX_LISTED = 12
"""Maximum samples in a cell of the table."""


def register(app: typer.Typer) -> None:
    app.command("assign", help=HELP, short_help="Show which rank reads which samples at a step.")(assign)


def assign(
    workers: Annotated[
        list[int], typer.Option("-n", "--workers", min=1, help="Workers; give it again to compare another number.")
    ],
    words: Annotated[
        list[str] | None,
        typer.Argument(help="The job, then values to change.", metavar="[JOB.toml] [TABLE.KEY=VALUE]..."),
    ] = None,
    step: Annotated[int, typer.Option(min=1, help="Which step, counted from 1.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Everything as JSON, for programs.")] = False,
) -> None:
    import json
    from pathlib import Path

    from closeranks.cli.data.job_data import open_job_data, parse_arguments
    from closeranks.cli.data.rank_samples import compare_assignments, samples_per_rank
    from closeranks.core.errors import UserError

    job_data = open_job_data(parse_arguments(words or [], Path.cwd()))
    if step > job_data.schedule.num_steps:
        what = f"the run of {job_data.name} has {job_data.schedule.num_steps} steps, and step {step} was asked for"
        raise UserError(what, f"Name one of 1 to {job_data.schedule.num_steps}.")
    assignments = {count: samples_per_rank(job_data, step - 1, count) for count in dict.fromkeys(workers)}
    if as_json:
        print(json.dumps(_as_dict(job_data, step, assignments), indent=1))
        return
    _print_head(job_data, step)
    for count, assignment in assignments.items():
        _print_assignment(count, assignment)
    first, *others = assignments.values()
    for other in others:
        typer.echo(f"\n{compare_assignments(first, other)}")


def _print_head(job_data: JobData, step: int) -> None:
    schedule = job_data.schedule
    first, last = schedule.position(step - 1), schedule.position(step)
    micro = schedule.num_micro_batches(step - 1)
    epoch = first // job_data.order.num_samples
    typer.echo(
        f"{job_data.name}: step {step} of {schedule.num_steps}, epoch {epoch}: positions {first:,} to {last - 1:,}, "
        f"{last - first} samples in {micro} {'micro-batch' if micro == 1 else 'micro-batches'}"
    )


def _print_assignment(count: int, assignment: Sequence[RankSamples]) -> None:
    from closeranks.telemetry.terminal_table import print_table

    ranks = f"{len(assignment)} data {'rank' if len(assignment) == 1 else 'ranks'}"
    typer.echo(f"\n{count} {'worker' if count == 1 else 'workers'}, {ranks}")
    rows = [
        [str(rank.rank), *(_spans(rank.micro_batches)), _ids(rank.samples), _short(rank.files)]
        if rank.micro_batches
        else [str(rank.rank), "none", "", "", ""]
        for rank in assignment
    ]
    headings: tuple[str, ...] = ("data rank", "micro-batches", "positions", "samples", "files")
    if not any(row[4] for row in rows):
        headings, rows = headings[:4], [row[:4] for row in rows]
    print_table(headings, rows, right=("data rank",), droppable=("files", "positions"))


def _spans(micro_batches: Sequence[Any]) -> tuple[str, str]:
    first, last = micro_batches[0], micro_batches[-1]
    numbers = str(first.index) if first.index == last.index else f"{first.index}-{last.index}"
    return numbers, f"{first.first}-{last.last - 1}"


def _ids(samples: Sequence[int]) -> str:
    more = f" and {len(samples) - _MAX_LISTED} more" if len(samples) > _MAX_LISTED else ""
    return ", ".join(map(str, samples[:_MAX_LISTED])) + more


def _short(files: Sequence[str], limit: int = 3) -> str:
    names = [name.rstrip("/").rpartition("/")[2] for name in files]
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def _as_dict(job_data: JobData, step: int, assignments: dict[int, list[RankSamples]]) -> dict[str, Any]:
    schedule = job_data.schedule
    return {
        "job": job_data.name,
        "step": step,
        "num_steps": schedule.num_steps,
        "first_position": schedule.position(step - 1),
        "last_position": schedule.position(step) - 1,
        "workers": {
            str(count): [_rank_as_dict(rank, step) for rank in assignment] for count, assignment in assignments.items()
        },
    }


def _rank_as_dict(rank: RankSamples, step: int) -> dict[str, Any]:
    from dataclasses import asdict

    fields = asdict(rank)
    return {**fields, "micro_batches": [{**one, "step": step} for one in fields["micro_batches"]]}
