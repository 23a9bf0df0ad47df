"""Formats the plans of a search as table rows and sentences.

Pure: results in, text out; ``cli`` prints it. Invariant: every estimate is shown with its unit, and what this version
models but does not train is marked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from closeranks.facts.cluster import Cluster
from closeranks.facts.durations import format_duration
from closeranks.facts.layout import Layout, divisors, legal_problems
from closeranks.facts.shapes.module_trace import ModuleTrace
from closeranks.facts.shapes.transformer import TransformerShape, num_active_params, num_params
from closeranks.plan.memory.estimate import side_by_side
from closeranks.plan.search.changes import PlanChange, smallest_fitting_change
from closeranks.plan.search.cost_curve import CostPoint
from closeranks.plan.search.costs import DAY_S, CostBasis, PlanCosts
from closeranks.plan.search.reasons import why_winner
from closeranks.plan.search.runner_up import runner_up_needs
from closeranks.plan.search.search import BORDERLINE, Plan, PlanEstimator, PlanQuestion, SearchResult
from closeranks.plan.search.space import planned_only
from closeranks.plan.step_time.workload import PlanChoice

Rows = list[tuple[str, ...]]
"""The first is the heading."""
HEADINGS = (
    "", "layout", "micro", "recompute", "precision", "compile", "step", "MFU", "{}/s", "memory", "", "goodput", "run",
    "cost",
)  # fmt: skip
DROPPABLE = ("goodput", "tokens/s", "samples/s", "compile", "precision", "recompute")
"""Columns that a narrow terminal leaves out, in this order."""
_SIGNS = {"USD": "$", "EUR": "€", "GBP": "£"}
_GIB = 1 << 30
_SHOWN_PART = 0.002
"""Parts of a step below this share are summed up as ``other``."""


def cluster_line(cluster: Cluster) -> str:
    """``64 H100-SXM on 8 hosts: NVLink 4 inside, InfiniBand NDR between``"""
    hosts = cluster.num_hosts
    inside = f"{cluster.intra_host.name} inside" if cluster.devices_per_host > 1 else ""
    between = f"{cluster.inter_host.name} between" if hosts > 1 and cluster.inter_host is not None else ""
    links = ", ".join(filter(None, (inside, between)))
    place = f"{cluster.num_devices:,} {cluster.device.name} on {hosts:,} host{'' if hosts == 1 else 's'}"
    return f"{place}: {links}" if links else place


def headline(name: str, result: SearchResult) -> str:
    cluster = result.question.cluster
    layouts = f"{result.num_layouts:,} layout{'' if result.num_layouts == 1 else 's'}"
    tried = f"{result.num_choices:,} choices of {layouts} were compared"
    count = len(result.plans)
    found = f"{count} that fit{'s is' if count == 1 else ' are'} shown" if count else "none fits"
    return f"{name} on {cluster_line(cluster)}.\n{tried}; {found}."


def plan_rows(
    plans: Sequence[Plan],
    costs: Sequence[PlanCosts],
    winner: Plan | None,
    own: Plan | None,
    currency: str,
    noun: str = "tokens",
) -> Rows:
    rows: Rows = [tuple(heading.format(noun) for heading in HEADINGS)]
    for number, (plan, cost) in enumerate(zip(plans, costs, strict=True), 1):
        mark = ("*" if plan is winner else "") + ("=" if own is not None and plan.choice == own.choice else "")
        rows.append((f"{number}{mark}", *_cells(plan, cost, currency)))
    return rows


def _cells(plan: Plan, cost: PlanCosts, currency: str) -> tuple[str, ...]:
    choice, memory = plan.choice, plan.memory
    return (
        layout_text(choice),
        str(choice.micro_batch),
        choice.recompute,
        choice.precision,
        "yes" if choice.compiled else "no",
        seconds_text(plan.step.seconds),
        percent(plan.step.mfu),
        count_text(cost.tokens_per_s),
        gib_text(memory.total_bytes),
        memory.verdict,
        percent(cost.goodput),
        "-" if cost.days is None else format_duration(DAY_S * cost.days),
        money_text(cost.money, currency),
    )


def layout_text(choice: PlanChoice) -> str:
    """The layout, and what of the choice is only planned."""
    marks = planned_only(choice)
    shown = str(choice.layout) + (" offload" if choice.offload else "")
    return f"{shown} (planned only: {', '.join(marks)})" if marks else shown


def choice_text(choice: PlanChoice) -> str:
    """``data=8 tensor=8, micro_batch=1, recompute=selective, bf16, compiled``"""
    words = [layout_text(choice), f"micro_batch={choice.micro_batch}"]
    words += [f"recompute={choice.recompute}"] if choice.recompute != "none" else []
    words += [choice.precision, *(["compiled"] if choice.compiled else [])]
    return ", ".join(words)


def part_rows(plans: Sequence[Plan], titles: Sequence[str]) -> Rows:
    """Where the time of a step goes: seconds and share of every part, in the order of the estimate."""
    shares = [{part.name: part.seconds for part in plan.step.parts} for plan in plans]
    names = list(dict.fromkeys(name for parts in shares for name in parts))
    shown = [
        name
        for name in names
        if any(parts.get(name, 0) > _SHOWN_PART * plan.step.seconds for parts, plan in zip(shares, plans, strict=True))
    ]
    rows: Rows = [("time of a step", *titles)]
    for name in shown:
        cells = (_with_share(parts.get(name, 0.0), plan) for parts, plan in zip(shares, plans, strict=True))
        rows.append((name, *cells))
    rest = [sum(parts.get(name, 0.0) for name in names if name not in shown) for parts in shares]
    if any(seconds > 1e-9 for seconds in rest):
        rows.append(("other", *(_with_share(seconds, plan) for seconds, plan in zip(rest, plans, strict=True))))
    rows.append(("total", *(seconds_text(plan.step.seconds) for plan in plans)))
    return rows


def _with_share(seconds: float, plan: Plan) -> str:
    if seconds <= 0:
        return "-"
    return f"{seconds_text(seconds)} {100 * seconds / plan.step.seconds:4.1f}%"


def memory_rows(plans: Sequence[Plan], titles: Sequence[str]) -> Rows:
    found = [{part.name: part.num_bytes for part in plan.memory.parts} for plan in plans]
    names = list(dict.fromkeys(name for parts in found for name in parts))
    rows: Rows = [("memory of a device, GiB", *titles)]
    rows += [(name, *(_gib_cell(parts.get(name, 0)) for parts in found)) for name in names]
    rows.append(("total", *(f"{plan.memory.total_bytes / _GIB:,.2f}" for plan in plans)))
    rows.append(("verdict", *(verdict_text(plan) for plan in plans)))
    return rows


def convention_rows(plans: Sequence[Plan], titles: Sequence[str], question: PlanQuestion) -> Rows:
    """The memory of a device if weights, gradients and optimizer took 16 bytes a parameter, or 12."""
    pairs = [side_by_side(question.workload, plan.choice, question.cluster) for plan in plans]
    rows: Rows = [("state of a parameter", *titles)]
    for name, found in zip(
        ("16 bytes: float32 master weights", "12 bytes: lean states"), zip(*pairs, strict=True), strict=True
    ):
        rows.append((name, *(f"{gib_text(one.total_bytes)} {one.verdict}" for one in found)))
    rows.append(
        ("as closeranks trains", *(f"{gib_text(plan.memory.total_bytes)} {plan.memory.verdict}" for plan in plans))
    )
    return rows


def _gib_cell(num_bytes: float) -> str:
    return f"{num_bytes / _GIB:,.2f}" if num_bytes else "-"


def change_rows(plan: Plan, changes: Sequence[PlanChange]) -> Rows:
    """One change at a time, and what it does to step and memory."""
    rows: Rows = [("one change", "step", "", "memory", "", "")]
    for change in changes:
        other = change.plan
        slower = other.step.seconds / plan.step.seconds - 1
        rows.append(
            (
                change.what, seconds_text(other.step.seconds), f"{100 * slower:+.1f}%",
                gib_text(other.memory.total_bytes), verdict_text(other),
                "planned only" if change.planned_only else "",
            )
        )  # fmt: skip
    return rows


def verdict_text(plan: Plan) -> str:
    """``fits``, ``borderline``, ``misses by 12.3 GiB``"""
    missing = 0 if plan.memory.verdict == BORDERLINE else plan.memory.missing_bytes
    return f"misses by {gib_text(missing)}" if missing > 0 else plan.memory.verdict


def why_lines(result: SearchResult) -> list[str]:
    winner = result.winner
    if winner is None:
        return []
    lines, question = [why_winner(result)], result.question
    estimator = PlanEstimator(question)
    for number, plan in enumerate(result.plans, 1):
        if plan is not winner:
            lines.append(f"{number}  {layout_text(plan.choice)}: {runner_up_needs(plan, winner, question, estimator)}")
    return lines


def nothing_fits_text(result: SearchResult, change: PlanChange | None, more: Plan | None = None) -> str:
    """By how much the closest plan misses, and what would make it fit. ``more``: the plan on the fewest devices on
    which one fits."""
    closest = result.closest
    if closest is None:
        return "No layout is legal for this model, batch and cluster."
    text = (
        f"Nothing fits. {choice_text(closest.choice)} comes closest: it needs "
        f"{gib_text(closest.memory.total_bytes)} on a device, {gib_text(closest.memory.missing_bytes)} too much."
    )
    where = "" if more is None else f" On {more.choice.layout.num_ranks:,} devices {choice_text(more.choice)} fits."
    return f"{text} {fix_text(change)}{where}"


def fix_text(change: PlanChange | None) -> str:
    if change is None:
        return "No single change makes it fit on these devices."
    only = " (planned only: this version does not train it)" if change.planned_only else ""
    return f"The smallest change that makes it fit: {change.what}{only}; a step then takes " + (
        f"{seconds_text(change.plan.step.seconds)}."
    )


def remarks(basis: CostBasis, own: Plan | None, result: SearchResult) -> list[str]:
    """What the marks mean, what days and cost count, and what the job's own layout does."""
    is_listed = own is not None and any(plan.choice == own.choice for plan in result.plans)
    marks = "* is the plan that is advised" + ("; = is the job's own." if is_listed else ".")
    budget = (
        "" if basis.budget is None else f" run and cost are to {count_text(basis.budget)} {basis.noun}, with goodput."
    )
    lines = [marks + budget]
    cluster = result.question.cluster
    if basis.budget is not None and not cluster.price_per_hour:
        lines.append(
            f"No price of {cluster.device.name} is known: write price_per_hour in a cluster file (docs/plan.md)."
        )
    if isinstance(trace := result.question.workload.shape, ModuleTrace):
        lines += [f"Not in these figures: {sentence}" for sentence in trace.untraced]
    if own is not None and not is_listed:
        lines.append(
            f"The job's own plan ({choice_text(own.choice)}) would take {seconds_text(own.step.seconds)} a step; "
            f"memory {gib_text(own.memory.total_bytes)}: {verdict_text(own)}."
        )
    if own is not None and (warning := tensor_host_warning(own.choice.layout, cluster)):
        lines.append(f"In the job's own layout {warning}")
    return lines


def config_lines(shape: TransformerShape) -> list[str]:
    """What a model of others has that a Llama has not, and how it was planned."""
    lines = []
    if shape.num_experts:
        dense = f" ({shape.num_dense_layers} layers have none)" if shape.num_dense_layers else ""
        lines.append(
            f"A token uses {shape.experts_per_token} of the {shape.num_experts} experts of a layer{dense}: "
            f"{count_text(num_active_params(shape))} of {count_text(num_params(shape))} weights. Only the tensor "
            'axis and ZeRO divide experts here; an expert axis is planned only (--compare "expert=2" "expert=1").'
        )
    if not shape.is_causal:
        lines.append(
            "Its attention is not causal: every position sees all others, which doubles the work of attention."
        )
    return lines


def comparison_lines(plans: Sequence[Plan], question: PlanQuestion, estimator: PlanEstimator) -> list[str]:
    """Which of them is better and where, what is wrong with each, and what makes one fit that does not."""
    lines = []
    for plan in plans:
        name = layout_text(plan.choice)
        needs = replace(question.constraints, micro_batch=plan.choice.micro_batch)
        lines += [
            f"{name} is not legal: {problem.what}. {problem.fix}"
            for problem in legal_problems(plan.choice.layout, needs)
        ]
        if warning := tensor_host_warning(plan.choice.layout, question.cluster):
            lines.append(f"{name}: {warning}")
        if plan.memory.missing_bytes > 0:
            change = smallest_fitting_change(plan, question, estimator)
            lines.append(f"{name} misses by {gib_text(plan.memory.missing_bytes)}. {fix_text(change)}")
    faster, slower = sorted(plans, key=lambda plan: plan.step.seconds)
    lines.append(f"{layout_text(slower.choice)} is {runner_up_needs(slower, faster, question, estimator)}.")
    return lines


def tensor_host_warning(layout: Layout, cluster: Cluster) -> str:
    """Says so if a layout's tensor axis leaves a host."""
    inside = cluster.domain_size
    if layout.tensor <= inside and inside % layout.tensor == 0:
        return ""
    if cluster.num_hosts == 1:
        return ""
    most = max(size for size in divisors(inside) if layout.tensor % size == 0)
    return (
        f"the tensor axis crosses hosts: {layout.tensor} ranks exchange activations in every layer, and a host has "
        f"{inside}. Use tensor={most}, and pipeline or zero for the rest."
    )


def seconds_text(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{1e6 * seconds:.0f} us"
    if seconds < 1:
        return f"{1e3 * seconds:.3g} ms" if seconds < 0.9995 else "1 s"
    return f"{seconds:.3g} s" if seconds < 1000 else format_duration(seconds)


def gib_text(num_bytes: float) -> str:
    gib = num_bytes / _GIB
    return f"{gib:,.1f} GiB" if gib >= 0.95 else f"{1024 * gib:,.0f} MiB"


def percent(share: float) -> str:
    """``45.6%``; below one percent two significant digits."""
    shown = 100 * share
    return "-" if not share else f"{shown:.1f}%" if shown >= 0.95 else f"{shown:.2g}%" if shown >= 1e-4 else "< 0.0001%"


def count_text(count: float) -> str:
    """1.23M, 45.6k"""
    for size, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g}{name}"
    return f"{count:.3g}"


def cost_rows(points: Sequence[CostPoint], chosen: CostPoint, currency: str) -> Rows:
    """The best plan on each number of devices."""
    rows: Rows = [("devices", "layout", "step", "MFU", "run", "device-hours", "cost")]
    for point in points:
        plan, costs = point.plan, point.costs
        run = "-" if costs.days is None else format_duration(DAY_S * costs.days)
        hours = "-" if costs.device_hours is None else f"{costs.device_hours:,.0f}"
        rows.append(
            (
                f"{point.num_devices:,}{'*' if point is chosen else ''}", layout_text(plan.choice),
                seconds_text(plan.step.seconds), percent(plan.step.mfu), run, hours, money_text(costs.money, currency),
            )
        )  # fmt: skip
    return rows


def money_text(amount: float | None, currency: str) -> str:
    if amount is None:
        return "-"
    sign = _SIGNS.get(currency, "")
    shown = f"{amount / 1e6:,.2f}M" if amount >= 1e6 else f"{amount:,.0f}" if amount >= 10 else f"{amount:,.2f}"
    return f"{sign}{shown}" if sign else f"{shown} {currency}".strip()
