"""Which lever helps a job scale further? What overlap, compression, a larger batch or another layout would gain.

Invariant: a gain is what the estimate says when one thing changes; where the estimate bounds it, the bound is named.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from closeranks.facts.layout import legal_problems
from closeranks.plan.scaling.scaling import ScalePoint, seconds_of
from closeranks.plan.search.search import Plan, PlanEstimator, search_plans, with_batch
from closeranks.plan.step_time.constants import frozen_constants
from closeranks.plan.step_time.estimate import StepEstimator

_DATA = ("data communication",)
_INT8_BYTES = 1.0


@dataclass(frozen=True, slots=True)
class Lever:
    """A change, the throughput it gives relative to now, and what it takes."""

    name: str
    gain: float
    """0.1: ten percent more tokens per second."""
    what: str


def levers(point: ScalePoint, own: Plan | None = None) -> list[Lever]:
    """The largest gain first. ``own``: the plan of the job's own layout on these devices, if it has one."""
    plan = point.plan
    if plan is None:
        return []
    found = [_overlap(plan), *_hierarchical(point, plan), *_compression(point, plan), *_larger_batch(point, plan)]
    if own is not None and own.fits and own.choice.layout != plan.choice.layout:
        gain = own.step.seconds / plan.step.seconds - 1
        found.append(Lever("other layout", gain, f"{plan.choice.layout} instead of the job's own {own.choice.layout}"))
    return sorted(found, key=lambda lever: -lever.gain)


def _overlap(plan: Plan) -> Lever:
    exposed = seconds_of(plan, _DATA)
    gain = plan.step.seconds / (plan.step.seconds - exposed) - 1
    return Lever("overlap", gain, "at most: all of the data axis hidden behind computing")


def _compression(point: ScalePoint, plan: Plan) -> list[Lever]:
    """Of gradients alone, where this version compresses them: gathered weights, and sums inside a shard, stay whole."""
    choice, asked = plan.choice, point.question
    if choice.precision == "fp16" or (choice.layout.zero == 3 and choice.layout.tensor > 1):
        return []
    constants = frozen_constants()
    software = replace(constants.of(choice.software), compressed_bytes=_INT8_BYTES)
    compressing = replace(constants, software={**constants.software, choice.software: software})
    other = StepEstimator(asked.workload, asked.cluster, constants=compressing).estimate(choice)
    what = 'int8 gradients: sync.compress.name = "int8" (encoding not counted; checks of the loss: docs/sync.md)'
    return [Lever("compression", plan.step.seconds / other.seconds - 1, what)]


def _hierarchical(point: ScalePoint, plan: Plan) -> list[Lever]:
    """Shards over one host instead of all data ranks, so that gathers stay inside."""
    layout, cluster = plan.choice.layout, point.question.cluster
    inside = cluster.domain_size // layout.tensor
    if layout.zero != 3 or layout.shard or not 1 < inside < layout.data or layout.data % inside:
        return []
    other = PlanEstimator(point.question).plan(replace(plan.choice, layout=replace(layout, shard=inside)))
    gain = plan.step.seconds / other.step.seconds - 1
    fits = "" if other.fits else f", which misses by {other.memory.missing_bytes / 2**30:,.1f} GiB"
    return [Lever("hierarchical", gain, f"shard={inside}: weights gathered inside a host{fits}")]


def _larger_batch(point: ScalePoint, plan: Plan) -> list[Lever]:
    asked = with_batch(point.question, 2 * point.global_batch)
    if legal_problems(plan.choice.layout, replace(asked.constraints, micro_batch=plan.choice.micro_batch)):
        return []
    best = search_plans(asked, limit=1).winner
    if best is None:
        return []
    gain = 2 * plan.step.seconds / best.step.seconds - 1
    rule = "sqrt" if plan.choice.optimizer in ("adamw", "lamb") else "linear"
    keys = f'optim.scaling = "{rule}", optim.base_batch = {point.global_batch}'
    what = f"twice the global batch, {2 * point.global_batch:,}, with {keys} (docs/large-batches.md)"
    return [Lever("larger batch", gain, what)]
