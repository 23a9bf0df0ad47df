"""``closeranks layout``: lists, shows and checks the layouts of a job."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

HELP = """How a job may be distributed over workers.

\b
  closeranks layout ls job.toml -n 8                        every legal layout: bytes per rank, traffic, bubble
  closeranks layout show job.toml "tensor=2 pipeline=2"     which rank holds what, and the schedule
  closeranks layout check job.toml "tensor=2 pipeline=2"    train a few steps, and prove it equal to one process
"""

LS_HELP = """List the legal layouts for a number of workers: memory of the fullest rank, traffic of the busiest.

\b
  closeranks layout ls job.toml -n 8
  closeranks layout ls job.toml -n 1024 model.preset=405b train.precision=bf16 --fits 141 --sort traffic
  closeranks layout ls job.toml -n 16 --schedule zbv --schedule interleaved-1f1b --hsdp
  closeranks layout ls job.toml -n 8 --json > layouts.json

Parameters, gradients, optimizer state and traffic are counted; activations are estimated. The least bytes come first
(--sort traffic: the fewest bytes sent), and the job's own layout is marked with a star. Nothing is started and torch is
not imported, unless the model is your own: then it is built without memory to count its parameters.
"""

SHOW_HELP = """Show a layout: the mesh of ranks, which rank holds what, who talks to whom, and the pipeline's schedule.

\b
  closeranks layout show job.toml -n 8
  closeranks layout show job.toml "data=2 tensor=2 pipeline=2"
  closeranks layout show job.toml "tensor=2 pipeline=4 schedule=zbv" -n 16 train.micro_batch=1
  closeranks layout show job.toml "tensor=4 data=8" --per-host 8
  closeranks layout show job.toml "pipeline=4" --picture mesh.png

A layout names the axes data, tensor and pipeline, and zero=0..3, shard and schedule. Axes that are left out are 1; with
-n, data takes what the others leave. Without a layout it is the job's own. One that is not legal is refused, and the
nearest legal one is named.
"""

CHECK_HELP = """Prove that a layout trains the same model as one process: your job, your model, your data.

\b
  closeranks layout check job.toml "tensor=2 pipeline=2"
  closeranks layout check job.toml "data=2 zero=3" --steps 5 --precision float64
  closeranks layout check job.toml "data=4 zero=3 shard=2" train.global_batch=16

Trains a few steps in one process and under the layout, in float64 and float32, on workers of this machine, and compares
losses, every gradient of the first step and every weight at the end. Says how far apart they are, or names the first
tensor that differs. Exit status: 0 equal, 1 different, 2 something in the job or the layout needs fixing.
"""

JobFile = Annotated[Path, typer.Argument(help="The job file.", metavar="JOB.toml")]
Workers = Annotated[int, typer.Option("-n", "--workers", min=0, help="Workers; 0: what the layout takes.")]
AsJson = Annotated[bool, typer.Option("--json", help="Everything as JSON, for programs.")]

layout = typer.Typer(help=HELP, no_args_is_help=True, rich_markup_mode=None)


def register(app: typer.Typer) -> None:
    app.add_typer(layout, name="layout", short_help="List, show and check layouts of a job over workers.")


@layout.command("ls", help=LS_HELP, short_help="List legal layouts with bytes, traffic and bubble.")
def ls(
    job: JobFile,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Values to change; '~table.key' unsets one.", metavar="[TABLE.KEY=VALUE]..."),
    ] = None,
    num_workers: Annotated[
        int, typer.Option("-n", "--workers", min=0, help="Workers; 0: one per GPU, or what the job's layout takes.")
    ] = 0,
    schedule: Annotated[
        list[str] | None, typer.Option(help="A pipeline schedule to try; give it again for more.")
    ] = None,
    hsdp: Annotated[bool, typer.Option("--hsdp", help="Also ZeRO over fewer than all data ranks.")] = False,
    sort: Annotated[Literal["bytes", "traffic"], typer.Option(help="Sort by the least of these.")] = "bytes",
    fits: Annotated[float, typer.Option(min=0, help="Leave out layouts that need more GiB per rank than this.")] = 0.0,
    limit: Annotated[int, typer.Option(min=1, help="Rows to show.")] = 24,
    show_all: Annotated[bool, typer.Option("--all", help="Show every row.")] = False,
    as_json: AsJson = False,
) -> None:
    from closeranks.cli import layout_list

    query = layout_list.LayoutQuery(
        schedules=tuple(schedule or ()), with_hsdp=hsdp, sort=sort, fits_gib=fits, limit=0 if show_all else limit
    )
    layout_list.list_layouts(job, overrides or [], num_workers, query, as_json=as_json)


@layout.command("show", help=SHOW_HELP, short_help="Show which rank holds what under a layout.")
def show(
    job: JobFile,
    words: Annotated[
        list[str] | None,
        typer.Argument(help="A layout, then values to change.", metavar="[LAYOUT] [TABLE.KEY=VALUE]..."),
    ] = None,
    num_workers: Workers = 0,
    per_host: Annotated[
        int, typer.Option("--per-host", min=0, help="Workers per host; 0: all on one host, or 8 per host.")
    ] = 0,
    picture: Annotated[
        Path | None, typer.Option(help="Draw mesh and schedule into this PNG.", metavar="OUT.png")
    ] = None,
    as_json: AsJson = False,
) -> None:
    from closeranks.cli import layout_list

    layout_list.show_layout(job, words or [], num_workers, picture, per_host=per_host, as_json=as_json)


@layout.command("check", help=CHECK_HELP, short_help="Prove that a layout trains what one process trains.")
def check(
    job: JobFile,
    words: Annotated[
        list[str] | None,
        typer.Argument(help="A layout, then values to change.", metavar="[LAYOUT] [TABLE.KEY=VALUE]..."),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps to train and compare.")] = 3,
    precision: Annotated[
        Literal["both", "float64", "float32"], typer.Option(help="Compare in both, or in one of them alone.")
    ] = "both",
) -> None:
    from closeranks.cli import layout_check

    layout_check.check_layout(job, words or [], ["float64", "float32"] if precision == "both" else [precision], steps)
