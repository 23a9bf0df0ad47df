"""What does a budget of tokens cost on fewer and on more devices? Days and money of the best plan on each number.

Invariant: every point is the winner of a search of its own; numbers on which nothing fits have no point.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from closeranks.core.errors import ConfigError
from closeranks.facts.cluster import with_devices
from closeranks.plan.search.costs import CostBasis, PlanCosts, plan_costs
from closeranks.plan.search.search import Plan, PlanQuestion, search_plans

FACTORS = (1 / 8, 1 / 4, 1 / 2, 1, 2, 4)
"""Of the cluster's devices."""


@dataclass(frozen=True, slots=True)
class CostPoint:
    """The best plan on a number of devices."""

    num_devices: int
    plan: Plan
    costs: PlanCosts


def cost_points(question: PlanQuestion, basis: CostBasis) -> list[CostPoint]:
    """From the fewest devices on; the job's global batch on all of them."""
    counts = {int(question.cluster.num_devices * factor) for factor in FACTORS}
    found = (cost_point(question, basis, count) for count in sorted(counts) if count)
    return [point for point in found if point is not None]


def cost_point(question: PlanQuestion, basis: CostBasis, num_devices: int) -> CostPoint | None:
    try:
        cluster = with_devices(question.cluster, num_devices)
    except ConfigError:
        return None  # hosts that are not full
    winner = search_plans(replace(question, cluster=cluster), limit=1).winner
    return None if winner is None else CostPoint(num_devices, winner, plan_costs(winner, cluster, basis))
