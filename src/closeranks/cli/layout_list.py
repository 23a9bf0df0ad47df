"""Lists and shows layouts on a terminal.

Imports no torch; ``run.job.describe`` does if the model is the user's own. Invariant: standard output holds the listing
and nothing else, so that ``--json`` can be piped.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from closeranks.cli.pictures import check_picture, picture_errors_explained
from closeranks.cli.snapshot_bytes import hosts_of_ranks, snapshot_bytes_per_rank, snapshot_memory_line
from closeranks.core.config.overrides import split_pairs
from closeranks.core.errors import ConfigError, Problem
from closeranks.core.registry import did_you_mean, is_import_path
from closeranks.core.system.environment import num_gpus
from closeranks.facts.layout import SCHEDULES, Layout
from closeranks.facts.mesh import tensor_axis_warning
from closeranks.plan import layout_text, mesh_text
from closeranks.plan.layouts import (
    LayoutCost,
    LayoutCostModel,
    PlanningJob,
    candidate_layouts,
    filter_legal,
    layout_cost,
)
from closeranks.run.job.describe import describe_job
from closeranks.run.job.job import Job, check_axes, check_workers, layout_for, load_job

_GIB = 1 << 30
_WIDE = 200
_AXES = ("data", "zero", "shard", "tensor", "pipeline", "context", "expert", "schedule")


@dataclass(frozen=True, slots=True)
class LayoutQuery:
    """Which layouts to list, and how many of them."""

    schedules: tuple[str, ...] = ()
    """Empty: the job's schedule."""
    with_hsdp: bool = False
    sort: Literal["bytes", "traffic"] = "bytes"
    fits_gib: float = 0.0
    limit: int = 0
    """0: all."""


def list_layouts(path: Path, overrides: Sequence[str], num_workers: int, query: LayoutQuery, *, as_json: bool) -> None:
    job = _load(path, overrides)
    num_ranks = num_workers or num_gpus() or layout_for(job, 1).num_ranks
    planning_job = describe_job(job)
    own = layout_text.canonical_layout(layout_for(job, num_ranks))
    found = filter_legal(_enumerated(job, num_ranks, query, own), planning_job.constraints)
    cost_model = LayoutCostModel(planning_job)
    costs = sorted((cost_model.cost(layout) for layout in found.legal), key=lambda cost: _order(cost, query.sort))
    fitting = [cost for cost in costs if not query.fits_gib or cost.fullest.total_bytes <= query.fits_gib * _GIB]
    fewest = _fewest(job, planning_job, cost_model, query) if query.fits_gib else None
    if as_json:
        rows = [layout_text.as_json(cost, is_job=cost.layout == own) for cost in fitting]
        refused = [{"axis": entry.axis, "count": entry.count, "example": entry.example.what} for entry in found.refused]
        least = {"fewest_workers": fewest.layout.num_ranks if fewest else None} if query.fits_gib else {}
        print(json.dumps({"num_ranks": num_ranks, "layouts": rows, "refused": refused, **least}, indent=1))
        return
    console = _console()
    if not costs:
        console.print(f"{path.name}: no layout of {num_ranks} ranks is legal.\n\n{layout_text.refused_text(found)}")
        return
    shown = fitting[: query.limit or None]
    if not any(cost.layout == own for cost in shown):
        shown += [cost for cost in costs if cost.layout == own]
    byte_unit = layout_text.byte_unit_for(shown)
    count = f"{len(costs)} legal layout{'' if len(costs) == 1 else 's'}"
    console.print(
        f"{path.name} on {num_ranks} rank{'' if num_ranks == 1 else 's'}: {count}; sizes in {byte_unit.name}\n"
    )
    console.print(_table(shown, byte_unit, own, console.width, knows_activations=planning_job.llama is not None))
    is_brief = console.width < layout_text.NARROW
    if not fitting:
        console.print(f"\n{layout_text.does_not_fit_text(costs, query.fits_gib)}", soft_wrap=not console.is_terminal)
    if query.fits_gib:
        again = shlex.join(["closeranks", "layout", "ls", str(path), *overrides])
        console.print(
            f"\n{layout_text.fewest_workers_text(fewest, query.fits_gib, again)}", soft_wrap=not console.is_terminal
        )
    remarks = (_closing(costs, fitting, shown, own, query), layout_text.refused_text(found))
    meaning = layout_text.legend(knows_activations=planning_job.llama is not None, is_brief=is_brief)
    for sentence in (*remarks, meaning):
        console.print(f"\n{sentence}", soft_wrap=not console.is_terminal)


def _fewest(job: Job, planning_job: PlanningJob, cost_model: LayoutCostModel, query: LayoutQuery) -> LayoutCost | None:
    """The layout with the least bytes on the fewest workers on which one fits; None if none fits.

    Tries the numbers of workers in ``layout_text.WORKERS``.
    """
    limit = query.fits_gib * _GIB
    state = cost_model.cost(Layout()).fullest.state
    for num_ranks in layout_text.WORKERS:
        if (state.parameters + state.gradients + state.optimizer) / num_ranks > limit:
            continue  # would not fit even if all of it were split evenly
        legal = filter_legal(_enumerated(job, num_ranks, query, Layout()), planning_job.constraints).legal
        costs = sorted((cost_model.cost(layout) for layout in legal), key=lambda cost: _order(cost, "bytes"))
        if costs and costs[0].fullest.total_bytes <= limit:
            return costs[0]
    return None


def _load(path: Path, overrides: Sequence[str]) -> Job:
    job = load_job(path, overrides).value
    if is_import_path(job.model.name):
        from closeranks.run.job.launch import add_job_folder_to_path

        add_job_folder_to_path(path)
    return job


def _console() -> Console:
    """As wide as the terminal, or wide enough for every column if there is none."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _WIDE
    return console


def _enumerated(job: Job, num_ranks: int, query: LayoutQuery, own: Layout) -> list[Layout]:
    schedules = query.schedules or (job.layout.schedule,)
    for name in schedules:
        if name not in SCHEDULES:
            what = f"there is no schedule '{name}'"
            raise ConfigError([Problem("--schedule", what, did_you_mean(name, SCHEDULES))])
    candidates = (candidate_layouts(num_ranks, schedule=name, with_hsdp=query.with_hsdp) for name in schedules)
    found = list(dict.fromkeys(layout for layouts in candidates for layout in layouts))
    return found if own in found or own.num_ranks != num_ranks else [*found, own]


def _order(cost: LayoutCost, sort: str) -> tuple[int, int, str]:
    keys = (cost.fullest.total_bytes, cost.busiest.sent_bytes)
    return (*(keys if sort == "bytes" else keys[::-1]), str(cost.layout))


def _table(
    costs: Sequence[LayoutCost], byte_unit: layout_text.ByteUnit, own: Layout, width: int, *, knows_activations: bool
) -> Table:
    is_narrow = width < layout_text.NARROW
    make, names = (
        (layout_text.brief_table_row, layout_text.BRIEF) if is_narrow else (layout_text.table_row, layout_text.COLUMNS)
    )
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("")
    for number, name in enumerate(names):
        table.add_column(name, justify="right" if number else "left", no_wrap=bool(number))
    for cost in costs:
        is_own = cost.layout == own
        row = make(cost, byte_unit, knows_activations=knows_activations)
        table.add_row("*" if is_own else "", *row, style="bold" if is_own else "")
    return table


def _closing(
    costs: Sequence[LayoutCost],
    fitting: Sequence[LayoutCost],
    shown: Sequence[LayoutCost],
    own: Layout,
    query: LayoutQuery,
) -> str:
    """How many layouts there are and are shown, which options show more, and which is the job's."""
    order = "least bytes first" if query.sort == "bytes" else "least traffic first"
    counted = [f"{len(shown)} of {len(costs)} shown, {order}"]
    if len(fitting) < len(costs):
        counted.append(f"{len(costs) - len(fitting)} need more than {query.fits_gib:g} GiB a rank")
    if len(shown) < len(fitting):
        counted.append("--all shows every one")
    if not query.with_hsdp:
        counted.append("--hsdp adds ZeRO over fewer than all data ranks")
    is_there = any(cost.layout == own for cost in costs)
    mark = "* is the job's own layout." if is_there else f"The job's own layout ({own}) is not among them."
    return f"{'; '.join(counted)}. {mark}"


def show_layout(
    path: Path, words: Sequence[str], num_workers: int, picture: Path | None, *, per_host: int, as_json: bool
) -> None:
    text, overrides = split_words(words)
    job = with_layout(_load(path, overrides), text, num_workers)
    num_ranks = num_workers or layout_for(job, 1).num_ranks
    if problems := [*check_axes(job), *check_workers(job, num_ranks)]:
        raise ConfigError(problems)
    planning_job = describe_job(job)
    if problems := check_workers(job, num_ranks, planning_job.constraints):  # a user's own model is known only now
        raise ConfigError(problems)
    cost = layout_cost(planning_job, layout_for(job, num_ranks))
    if picture is not None:
        from closeranks.plan.mesh_picture import draw_layout

        check_picture(picture)
        with picture_errors_explained(picture):
            draw_layout(cost, picture)
    if as_json:
        ranks = {"num_ranks": num_ranks, "ranks": layout_text.ranks_as_json(cost)}
        copies = {"host_copies_bytes": snapshot_bytes_per_rank(job, cost, per_host)}
        print(json.dumps({**layout_text.as_json(cost, is_job=not text), **ranks, **copies}, indent=1))
        return
    console = Console(highlight=False, soft_wrap=True)
    for line in _description(cost, planning_job, snapshot_memory_line(job, cost, per_host)):
        console.print(line, markup=False)
    if warning := tensor_axis_warning(cost.layout, hosts_of_ranks(num_ranks, per_host)):
        console.print(f"\nwarning: {warning}", markup=False)
    if picture is not None:
        console.print(f"\npicture: {picture}", markup=False)


def split_words(words: Sequence[str]) -> tuple[str, list[str]]:
    """A layout's text and the job's overrides."""
    of_layout = [word for word in words if not _is_override(word)]
    return " ".join(of_layout), [word for word in words if _is_override(word)]


def _is_override(word: str) -> bool:
    """Whether a word is ``table.key=value`` or ``table="key=value"``.

    ``data`` is both a table and an axis: it is the axis if a number follows.
    """
    key, _, value = word.partition("=")
    is_table = key.strip() in Job.model_fields and not value.strip()[:1].isdecimal()
    return "." in key or is_table


def with_layout(job: Job, text: str, num_workers: int = 0) -> Job:
    """The job with the layout that ``text`` describes; unchanged if it is empty.

    Axes that the text leaves out are 1, except that data takes the remaining workers if ``num_workers`` is given.
    """
    if not text.strip():
        return job
    layout = Layout.parse(text)
    values: dict[str, Any] = {name: getattr(layout, name) for name in _AXES}
    says_data = any(pair.startswith("data=") for pair in split_pairs(text))
    if num_workers and not says_data:
        values["data"] = 0
    return job.model_copy(update={"layout": job.layout.model_copy(update=values)})


def _description(cost: LayoutCost, planning_job: PlanningJob, copies: str) -> list[str]:
    layout, knows = cost.layout, planning_job.llama is not None
    micro = f"{cost.num_micro} micro-batch{'' if cost.num_micro == 1 else 'es'} a step on each data rank"
    byte_unit = layout_text.byte_unit_for([cost])
    parts = [
        [f"{layout} on {layout.num_ranks} rank{'' if layout.num_ranks == 1 else 's'}, {micro}"],
        list(mesh_text.mesh_lines(cost)),
        list(mesh_text.group_lines(layout)),
        [*mesh_text.byte_lines(cost, byte_unit, knows_activations=knows), copies],
        list(mesh_text.traffic_lines(cost)),
        _schedule_lines(cost),
        [_remark(knows)],
    ]
    return [line for part in parts if part for line in (*part, "")][:-1]


def _remark(knows_activations: bool) -> str:
    if knows_activations:
        return "State and traffic are counted, activations estimated; an allocator needs 10 to 25% on top."
    return "Activations of this model are not known: the totals are state alone."


def _schedule_lines(cost: LayoutCost) -> list[str]:
    if cost.layout.pipeline == 1:
        return []
    from closeranks.facts.pipeline.schedules import schedule_for
    from closeranks.facts.pipeline.timeline import timeline
    from closeranks.plan.schedule_picture import schedule_text

    made = schedule_for(cost.layout.schedule, cost.layout.pipeline, cost.num_micro)
    return schedule_text(timeline(made)).splitlines()
