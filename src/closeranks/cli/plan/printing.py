"""Prints the plans of a search on a terminal or into a pipe."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from closeranks.plan.search import plan_text
from closeranks.plan.search.changes import is_legal, single_changes, smallest_fitting_change
from closeranks.plan.search.cost_curve import fewest_devices
from closeranks.plan.search.costs import plan_costs
from closeranks.plan.search.plan_json import plan_json, result_json
from closeranks.plan.search.search import PlanEstimator
from closeranks.telemetry.terminal_table import print_table, stdout

if TYPE_CHECKING:
    from closeranks.cli.plan.question import JobQuestion
    from closeranks.plan.search.cost_curve import CostPoint
    from closeranks.plan.search.search import Plan, SearchResult

_MOST_CHANGES = 16
_LEFT = ("layout", "recompute", "precision", "what", "")
"""Columns of words, which are aligned to the left."""


def print_result(asked: JobQuestion, result: SearchResult, name: str, *, why: bool) -> None:
    console = stdout()
    cluster = asked.question.cluster
    console.print(plan_text.headline(name, result), soft_wrap=True)
    if not result.plans:
        estimator = PlanEstimator(asked.question)
        change = smallest_fitting_change(result.closest, asked.question, estimator) if result.closest else None
        more = fewest_devices(asked.question)
        console.print("", plan_text.nothing_fits_text(result, change, more), sep="\n", soft_wrap=True)
        return
    costs = [plan_costs(plan, cluster, asked.basis) for plan in result.plans]
    own = own_plan(asked)
    show_table(
        plan_text.plan_rows(result.plans, costs, result.winner, own, cluster.currency, asked.basis.noun),
        droppable=plan_text.DROPPABLE,
    )
    for line in plan_text.remarks(asked.basis, own, result):
        console.print(line, soft_wrap=True)
    if why:
        print_why(asked, result)


def own_plan(asked: JobQuestion) -> Plan | None:
    """Of the job as it stands; None if it does not run on this cluster."""
    if asked.own is None or not is_legal(asked.own, asked.question):
        return None
    return PlanEstimator(asked.question).plan(asked.own)


def print_why(asked: JobQuestion, result: SearchResult) -> None:
    console, winner = stdout(), result.winner
    if winner is None:
        return
    console.print("", *plan_text.why_lines(result), sep="\n", soft_wrap=True)
    others = [plan for plan in result.plans if plan is not winner][:2]
    shown = [winner, *others]
    titles = [plan_text.layout_text(plan.choice) for plan in shown]
    show_table(plan_text.part_rows(shown, titles))
    show_table(plan_text.memory_rows(shown, titles))
    show_table(plan_text.convention_rows(shown, titles, asked.question))
    changes = single_changes(winner, asked.question, PlanEstimator(asked.question))[:_MOST_CHANGES]
    show_table(plan_text.change_rows(winner, changes))


def print_costs(points: Sequence[CostPoint], chosen: CostPoint, currency: str) -> None:
    console = stdout()
    console.print("The best plan on each number of devices; * is the cheapest", soft_wrap=True)
    show_table(plan_text.cost_rows(points, chosen, currency), gap=False)
    console.print()


def print_comparison(asked: JobQuestion, plans: Sequence[Plan], texts: Sequence[str], *, as_json: bool) -> None:
    cluster = asked.question.cluster
    costs = [plan_costs(plan, cluster, asked.basis) for plan in plans]
    if as_json:
        print(json.dumps([plan_json(plan, cost) for plan, cost in zip(plans, costs, strict=True)], indent=1))
        return
    console = stdout()
    console.print(plan_text.cluster_line(cluster), soft_wrap=True)
    show_table(
        plan_text.plan_rows(plans, costs, None, None, cluster.currency, asked.basis.noun), droppable=plan_text.DROPPABLE
    )
    show_table(plan_text.part_rows(plans, texts))
    show_table(plan_text.memory_rows(plans, texts))
    show_table(plan_text.convention_rows(plans, texts, asked.question))
    estimator = PlanEstimator(asked.question)
    console.print("", *plan_text.comparison_lines(plans, asked.question, estimator), sep="\n", soft_wrap=True)


def print_json(asked: JobQuestion, result: SearchResult) -> None:
    cluster = asked.question.cluster
    costs = [plan_costs(plan, cluster, asked.basis) for plan in result.plans]
    change = None
    if result.closest is not None:
        change = smallest_fitting_change(result.closest, asked.question, PlanEstimator(asked.question))
    print(json.dumps(result_json(result, costs, plan_text.why_lines(result), change), indent=1))


def show_table(rows: plan_text.Rows, droppable: Sequence[str] = (), *, gap: bool = True) -> None:
    if gap:
        stdout().print()
    heading = rows[0]
    left = (heading[0], *_LEFT)
    print_table(heading, rows[1:], right=[cell for cell in heading if cell not in left], droppable=droppable)
