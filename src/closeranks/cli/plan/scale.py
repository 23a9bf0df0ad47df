"""``closeranks plan scale job.toml --from 8 --to 1024``: how a job scales, and which lever helps next.

Imports no torch, unless the model is the user's own. Invariant: standard output holds the curves and nothing else, so
that ``--json`` can be piped.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from closeranks.cli.plan.search import CalibrationFile, JobFile, Keep, Margin, Overrides

if TYPE_CHECKING:
    from collections.abc import Sequence

    from closeranks.cli.plan.question import JobQuestion
    from closeranks.plan.scaling.levers import Lever
    from closeranks.plan.scaling.scaling import ScaleCurve

HELP = """How a job scales over devices: strong and weak scaling, where communication takes over, what helps next.

\b
  closeranks plan scale job.toml --cluster h100 --from 8 --to 1024
  closeranks plan scale job.toml --cluster cluster.toml --from 64 --to 4096 --picture scale.png
  closeranks plan scale job.toml --cluster a100 --from 8 --to 512 model.preset=13b --json

Every row is the best plan on that many devices, found by a search of its own. Strong scaling keeps the job's global
batch; in weak scaling it grows with the devices, from the job's on the smallest number (--batch-at). Efficiency is
throughput per device relative to the smallest number on which something fits. Below stands what overlap, shards inside
hosts, compression, a larger batch (with the rule for its learning rate) or another layout would gain on the largest.
"""


def register(app: typer.Typer) -> None:
    app.command("scale", help=HELP, short_help="Strong and weak scaling, and what helps next.")(scale)


def scale(
    job: JobFile,
    overrides: Overrides = None,
    cluster: Annotated[
        str, typer.Option(help="The kind of device, such as h100, or a cluster file.", metavar="DEVICE|FILE.toml")
    ] = "",
    first: Annotated[int, typer.Option("--from", min=1, help="The smallest number of devices.")] = 8,
    last: Annotated[int, typer.Option("--to", min=1, help="The largest.")] = 1024,
    batch_at: Annotated[
        int, typer.Option(min=0, help="Weak scaling: the devices that the job's batch is meant for; 0: the smallest.")
    ] = 0,
    keep: Keep = None,
    margin: Margin = 0.02,
    picture: Annotated[Path | None, typer.Option(help="Also draw it into this PNG.", metavar="OUT.png")] = None,
    calibration: CalibrationFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Everything as JSON, for programs.")] = False,
) -> None:
    from closeranks.cli.pictures import check_picture, picture_errors_explained
    from closeranks.cli.plan.question import job_question, require_cluster
    from closeranks.cli.progress_bar import progress
    from closeranks.plan.scaling.levers import levers
    from closeranks.plan.scaling.scaling import device_counts, own_plan, scale_curves

    require_cluster(cluster, "--cluster h100")
    check_picture(picture)
    counts = device_counts(first, last)
    asked = job_question(
        job, overrides or [], cluster, keep=keep or (), margin=margin, calibration=calibration, num_devices=counts[-1]
    )
    with progress("searching") as on_point:
        curves = scale_curves(asked.question, counts, batch_at or counts[0], on_point)
    largest = next((point for point in reversed(curves[0].points) if point.plan is not None), None)
    found = levers(largest, own_plan(largest, asked.own)) if largest is not None else []
    if picture is not None:
        from closeranks.plan.scaling.scaling_picture import draw_scaling

        with picture_errors_explained(picture):
            draw_scaling(f"{job.name} on {cluster}", curves, asked.basis.noun, asked.basis.seq_len, picture)
    if as_json:
        _print_json(curves, found, asked)
    else:
        _print(curves, found, asked, job.name, picture)


def _print_json(curves: Sequence[ScaleCurve], found: Sequence[Lever], asked: JobQuestion) -> None:
    import json

    from closeranks.plan.scaling.scaling_text import scale_json

    print(json.dumps(scale_json(curves, found, asked.basis.seq_len), indent=1))


def _print(
    curves: Sequence[ScaleCurve], found: Sequence[Lever], asked: JobQuestion, name: str, picture: Path | None
) -> None:
    from closeranks.cli.plan.printing import show_table
    from closeranks.plan.scaling import scaling_text
    from closeranks.telemetry.terminal_table import stdout

    console = stdout()
    console.print(f"{name} on {asked.question.cluster.device.name}", soft_wrap=True)
    for curve in curves:
        console.print("", scaling_text.TITLES[curve.kind], sep="\n")
        show_table(scaling_text.curve_rows(curve, asked.basis.seq_len), scaling_text.DROPPABLE, gap=False)
        console.print(scaling_text.takes_over_text(curve), soft_wrap=True)
    if found:
        largest = max(point.num_devices for point in curves[0].points if point.plan is not None)
        console.print("", f"What helps next at {largest:,} devices, with the same batch", sep="\n")
        show_table(scaling_text.lever_rows(found), gap=False)
    if picture is not None:
        console.print(f"\npicture: {picture}", soft_wrap=True)
