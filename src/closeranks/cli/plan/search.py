"""``closeranks plan job.toml --cluster 64xh100``: ranks the layouts of a job on a cluster, and says why.

Imports no torch, unless the model is the user's own. Invariant: standard output holds the plans and nothing else, so
that ``--json`` can be piped.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from closeranks.cli.plan.question import JobQuestion
    from closeranks.plan.search.search import SearchResult

HELP = """Rank the layouts of a job on a cluster: time of a step, memory, MFU, goodput, days and money.

\b
  closeranks plan job.toml --cluster 64xh100
  closeranks plan job.toml --cluster cluster.toml --tokens 300B --why
  closeranks plan job.toml --cluster 64xh100 model.preset=13b train.global_batch=512 --out planned.toml
  closeranks plan job.toml --cluster 512xa100 --compare "data=64 tensor=4 pipeline=2" "tensor=8"
  closeranks plan job.toml --cluster 1024xh100 --tokens 300B --sort cost --days 30
  closeranks plan job.toml --cluster 64xh100 --keep micro-batch --keep precision
  closeranks plan job.toml --cluster 1024xh100 --tokens 2T --picture plans.png
  closeranks plan job.toml --cluster 64xh100 --model Mixtral-8x7B/config.json
  closeranks plan job.toml --cluster 64xh100 --json > plans.json

A cluster is a number of devices (64xh100) or a file that names device, hosts, links, price and failures. A row is a
layout with the best micro-batch, recompute and schedule for it; * marks the plan that is advised: the simplest within
--margin of the fastest that fits. --out writes it as a job file that `closeranks train` runs. What this version models
but does not train (context, expert, offload, fp8) is marked "planned only" and never written. How times and memory are
estimated, and how far off they are: docs/plan.md.
"""


def register(app: typer.Typer) -> None:
    app.command("search", help=HELP, short_help="Rank layouts: time, memory, days, money (the default).")(search)


JobFile = Annotated[Path, typer.Argument(help="The job file.", metavar="JOB.toml")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Values to change; '~table.key' unsets one.", metavar="[TABLE.KEY=VALUE]..."),
]
ClusterName = Annotated[
    str, typer.Option(help="The devices, such as 64xh100, or a file.", metavar="NxDEVICE|FILE.toml")
]
Tokens = Annotated[
    str, typer.Option(help="Tokens to train on, such as 300B.  [default: those of the job's steps]", metavar="N")
]
Keep = Annotated[
    list[str] | None,
    typer.Option(
        help="What stays as in the job: layout, micro-batch, recompute, precision, compile, schedule or zero."
    ),
]
Compare = Annotated[
    tuple[str, str], typer.Option(help="Two layouts to compare part by part.", metavar='"LAYOUT" "LAYOUT"')
]
Margin = Annotated[float, typer.Option(min=0, max=1, help="A simpler plan wins if it is slower by at most this share.")]
CalibrationFile = Annotated[
    Path | None, typer.Option(help="What `closeranks plan calibrate` measured.", metavar="FILE")
]
Failures = Annotated[
    str, typer.Option(help="A table of failures: llama3, research, spot, or a file.", metavar="NAME|FILE.toml")
]


def search(
    job: JobFile,
    overrides: Overrides = None,
    cluster: ClusterName = "",
    tokens: Tokens = "",
    keep: Keep = None,
    compare: Compare = ("", ""),
    margin: Margin = 0.02,
    sort: Annotated[
        Literal["time", "cost"], typer.Option(help="cost: the cheapest number of devices up to the cluster's.")
    ] = "time",
    days: Annotated[float | None, typer.Option(help="With --sort cost: the run must end within so many days.")] = None,
    budget: Annotated[
        float | None, typer.Option(help="With --sort cost: refuse what costs more, in the cluster's currency.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Layouts to list.")] = 10,
    why: Annotated[bool, typer.Option("--why", help="Say why the plan won, and what others would need.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the advised plan as a job file.", metavar="JOB.toml")] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Draw memory, time and cost into this PNG.", metavar="OUT.png")
    ] = None,
    calibration: CalibrationFile = None,
    failures: Failures = "",
    model: Annotated[
        Path | None,
        typer.Option(help="Plan this Hugging Face config instead of the job's model.", metavar="CONFIG.json"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Everything as JSON, for programs.")] = False,
) -> None:
    from closeranks.cli.pictures import check_picture
    from closeranks.cli.plan.job_file import check_out
    from closeranks.cli.plan.question import job_question, require_above_zero, require_cluster

    require_cluster(cluster, "--cluster 8xh100")
    require_above_zero("--days", days)
    require_above_zero("--budget", budget)
    check_picture(picture)
    check_out(out)
    _check_together(out, model, is_comparison=any(compare), by_cost=bool(days or budget) or sort == "cost")
    asked = job_question(
        job, overrides or [], cluster, keep=keep or (), tokens=tokens, margin=margin, calibration=calibration,
        failures=failures, model=model,
    )  # fmt: skip
    if any(compare):
        _compare(asked, compare, f"{job.name} on {cluster}", picture, as_json=as_json)
        return
    if sort == "cost" or days or budget:
        asked = _cheapest(asked, days or 0.0, budget or 0.0, as_json=as_json)
    result = _searched(asked, limit)
    if picture is not None and result.plans:
        _draw(asked, result, f"{job.name} on {cluster}", picture)
    _show(asked, result, job, why=why, as_json=as_json, picture=picture if result.plans else None)
    if model is not None and not as_json:
        _tell_model(model, asked)
    if out is not None:
        _write(asked, result, job, overrides or [], out, quiet=as_json)


def _searched(asked: JobQuestion, limit: int) -> SearchResult:
    from closeranks.core.errors import UserError
    from closeranks.plan.search.reasons import nothing_legal
    from closeranks.plan.search.search import search_plans

    result = search_plans(asked.question, limit)
    if not result.num_choices:
        raise UserError(*nothing_legal(asked.question))
    return result


def _tell_model(model: Path, asked: JobQuestion) -> None:
    from closeranks.plan.search.plan_text import config_lines

    typer.echo(f"\nPlanned is {model}, not the job's model: closeranks trains Llamas, and modules of your own.")
    for line in config_lines(asked.question.workload.transformer):
        typer.echo(line)


def _check_together(out: Path | None, model: Path | None, *, is_comparison: bool, by_cost: bool) -> None:
    """Refuse options that cannot both be meant; those of a search would be ignored beside two given layouts."""
    from closeranks.core.errors import UserError

    if out is not None and model is not None:
        raise UserError(f"{out} would train the job's model, not {model}", "Leave out --out.")
    if not is_comparison:
        return
    if out is not None:
        what = f"{out} was not written: --out writes the plan that is advised, and --compare advises none"
        raise UserError(
            what, 'Leave out --compare, and write one of them: layout="LAYOUT" --keep layout --out JOB.toml.'
        )
    if by_cost:
        what = (
            "--compare stays on the cluster's devices, and --sort cost, --days and --budget look for a number of them"
        )
        raise UserError(what, "Leave out one or the other.")


def _compare(asked: JobQuestion, texts: tuple[str, str], title: str, picture: Path | None, *, as_json: bool) -> None:
    from closeranks.cli.pictures import picture_errors_explained
    from closeranks.cli.plan.printing import print_comparison
    from closeranks.cli.plan.question import compared_choice
    from closeranks.plan.search.search import PlanEstimator

    estimator, cluster = PlanEstimator(asked.question), asked.question.cluster
    plans = [estimator.plan(compared_choice(text, asked)) for text in texts]
    if picture is not None:
        from closeranks.plan.search.plan_picture import draw_plans

        with picture_errors_explained(picture):
            draw_plans(title, plans, None, cluster.device.memory_bytes, (), cluster.currency, picture)
    print_comparison(asked, plans, texts, as_json=as_json)
    if picture is not None and not as_json:
        typer.echo(f"\npicture: {picture}")


def _cheapest(asked: JobQuestion, days: float, budget: float, *, as_json: bool) -> JobQuestion:
    """The question on the number of devices on which the tokens cost least."""
    from closeranks.cli.plan.printing import print_costs
    from closeranks.cli.plan.question import on_devices
    from closeranks.plan.search.cost_curve import cheapest, cost_points, fewer_devices

    points = cost_points(asked.question, asked.basis, fewer_devices(asked.question.cluster.num_devices))
    chosen = cheapest(points, most_days=days, budget=budget)
    if not as_json:
        print_costs(points, chosen, asked.question.cluster.currency)
    return on_devices(asked, chosen.num_devices)


def _draw(asked: JobQuestion, result: SearchResult, title: str, picture: Path) -> None:
    from closeranks.cli.pictures import picture_errors_explained
    from closeranks.plan.search.cost_curve import cost_points
    from closeranks.plan.search.plan_picture import draw_plans

    cluster = asked.question.cluster
    count = cluster.num_devices
    points = cost_points(
        asked.question, asked.basis, {count // 8 or 1, count // 4 or 1, count // 2 or 1, count, 2 * count}
    )
    with picture_errors_explained(picture):
        draw_plans(title, result.plans, result.winner, cluster.device.memory_bytes, points, cluster.currency, picture)


def _show(
    asked: JobQuestion, result: SearchResult, job: Path, *, why: bool, as_json: bool, picture: Path | None
) -> None:
    from closeranks.cli.plan import printing

    if as_json:
        printing.print_json(asked, result)
    else:
        printing.print_result(asked, result, job.name, why=why)
    if picture is not None and not as_json:
        typer.echo(f"\npicture: {picture}")


def _write(
    asked: JobQuestion, result: SearchResult, job: Path, overrides: Sequence[str], out: Path, *, quiet: bool
) -> None:
    from closeranks.cli.plan.job_file import changed_values, write_job
    from closeranks.core.errors import UserError
    from closeranks.plan.search.plan_text import choice_text, cluster_line

    winner = result.winner
    if winner is None:
        raise UserError(f"{out} was not written: no plan fits", "Use more devices, or change the job.")
    cluster = cluster_line(asked.question.cluster)
    write_job(job, overrides, asked.job, winner.choice, out, f"Planned for {cluster}.\n{choice_text(winner.choice)}")
    if not quiet:
        changes = changed_values(asked.job, winner.choice)
        what = ", ".join(f"{key} = {value}" for key, (_, value) in changes.items()) or "nothing changed"
        typer.echo(f"\nWritten: {out} ({what})\n  closeranks train {out} -n {winner.choice.layout.num_ranks}")
