"""What does a budget of tokens cost on fewer and on more devices? Days and money of the best plan on each number.

Invariant: every point is the winner of a search of its own; numbers on which nothing fits have no point.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from closeranks.core.errors import ConfigError, UserError
from closeranks.facts.cluster import full_hosts, with_devices
from closeranks.plan.search.costs import CostBasis, PlanCosts, plan_costs
from closeranks.plan.search.search import Plan, PlanQuestion, search_plans

_MOST_DOUBLINGS = 6


@dataclass(frozen=True, slots=True)
class CostPoint:
    """The best plan on a number of devices."""

    num_devices: int
    plan: Plan
    costs: PlanCosts


def fewer_devices(num_devices: int) -> list[int]:
    """The number and its halves, down to one device."""
    counts = [num_devices]
    while counts[-1] % 2 == 0:
        counts.append(counts[-1] // 2)
    return counts[::-1]


def cost_points(question: PlanQuestion, basis: CostBasis, counts: Iterable[int]) -> list[CostPoint]:
    """With the job's global batch on every number of devices."""
    found = (_cost_point(question, basis, count) for count in sorted(counts))
    return [point for point in found if point is not None]


def _cost_point(question: PlanQuestion, basis: CostBasis, num_devices: int) -> CostPoint | None:
    try:
        cluster = with_devices(question.cluster, num_devices)
    except ConfigError:
        return None  # hosts that are not full
    winner = search_plans(replace(question, cluster=cluster), limit=1).winner
    return None if winner is None else CostPoint(num_devices, winner, plan_costs(winner, cluster, basis))


def fewest_devices(question: PlanQuestion) -> Plan | None:
    """The best plan on the fewest devices on which one fits, in doublings of the cluster; None up to 64 times it."""
    for doublings in range(1, _MOST_DOUBLINGS + 1):
        num_devices = full_hosts(question.cluster, question.cluster.num_devices << doublings)
        cluster = with_devices(question.cluster, num_devices)
        if winner := search_plans(replace(question, cluster=cluster), limit=1).winner:
            return winner
    return None


def cheapest(points: Sequence[CostPoint], *, most_days: float = 0.0, budget: float = 0.0) -> CostPoint:
    """The point with the fewest device-hours that ends in time; ``UserError`` if none does, or none can be paid."""
    if not points:
        raise UserError("nothing fits on these devices, nor on fewer", "Use more devices, or devices with more memory.")
    if any(point.costs.days is None for point in points):
        raise UserError("a cost needs a number of tokens", "Name it, such as --tokens 300B.")
    in_time = [point for point in points if not most_days or (point.costs.days or 0.0) <= most_days]
    if not in_time:
        least = min(point.costs.days or 0.0 for point in points)
        raise UserError(
            f"no plan ends within {most_days:g} days: the fastest takes {least:,.1f}",
            "Use more devices, fewer tokens or more days.",
        )
    best = min(in_time, key=lambda point: point.costs.device_hours or 0.0)
    if budget and best.costs.money is None:
        raise UserError("a budget needs a price", "Name price_per_hour in a cluster file (docs/plan.md).")
    if budget and (best.costs.money or 0.0) > budget:
        raise UserError(
            f"a budget of {budget:,.0f} is too small: the cheapest plan costs {best.costs.money or 0.0:,.0f}, on "
            f"{best.num_devices:,} devices in {best.costs.days or 0.0:,.1f} days",
            "Train on fewer tokens, or name a larger budget.",
        )
    return best
