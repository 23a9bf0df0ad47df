"""The plans of a search as plain values, for programs.

Invariant: only what JSON holds; every number has its unit in its key.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from closeranks.facts.cluster import Cluster
from closeranks.plan.search.changes import PlanChange
from closeranks.plan.search.costs import PlanCosts
from closeranks.plan.search.search import Plan, SearchResult
from closeranks.plan.search.space import planned_only


def result_json(
    result: SearchResult, costs: Sequence[PlanCosts], why: Sequence[str], change: PlanChange | None
) -> dict[str, Any]:
    winner = result.winner
    return {
        "cluster": cluster_json(result.question.cluster),
        "num_choices": result.num_choices,
        "num_layouts": result.num_layouts,
        "margin": result.question.margin,
        "advised": None if winner is None else result.plans.index(winner),
        "plans": [plan_json(plan, cost) for plan, cost in zip(result.plans, costs, strict=True)],
        "faster_but_too_big": [plan_json(plan) for plan in result.misses],
        "closest": None if result.closest is None else plan_json(result.closest),
        "smallest_change": None if change is None else {"what": change.what, **plan_json(change.plan)},
        "why": list(why),
    }


def plan_json(plan: Plan, cost: PlanCosts | None = None) -> dict[str, Any]:
    choice = plan.choice
    found = {
        "layout": str(choice.layout),
        "micro_batch": choice.micro_batch,
        "recompute": choice.recompute,
        "precision": choice.precision,
        "compile": choice.compiled,
        "offload": choice.offload,
        "planned_only": list(planned_only(choice)),
        "complexity": plan.complexity,
        "step_s": plan.step.seconds,
        "step_parts_s": {part.name: part.seconds for part in plan.step.parts},
        "mfu": plan.step.mfu,
        "hfu": plan.step.hfu,
        "memory_bytes": plan.memory.total_bytes,
        "memory_parts_bytes": {part.name: part.num_bytes for part in plan.memory.parts},
        "verdict": plan.memory.verdict,
        "missing_bytes": plan.memory.missing_bytes,
        **({} if cost is None else asdict(cost)),
    }
    return {key: _finite(value) for key, value in found.items()}


def cluster_json(cluster: Cluster) -> dict[str, Any]:
    between = cluster.inter_host
    return {
        "device": cluster.device.name,
        "num_devices": cluster.num_devices,
        "devices_per_host": cluster.devices_per_host,
        "intra_host": cluster.intra_host.name,
        "inter_host": None if between is None else between.name,
        "price_per_hour": cluster.price_per_hour,
        "currency": cluster.currency,
    }


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
