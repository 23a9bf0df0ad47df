"""What does changing one thing of a plan do? Single changes, their estimates, and the smallest one that makes it fit.

Changes that this version models but does not train (context, expert, offload, fp8) are tried too, and say so.
Invariant: every change is legal on the same devices, and differs from the plan in one decision; axes trade ranks with
the data axis.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from closeranks.facts.layout import SCHEDULES, Layout, LayoutConstraints, legal_problems
from closeranks.plan.search.search import Plan, PlanEstimator, PlanQuestion
from closeranks.plan.search.space import planned_only
from closeranks.plan.step_time.workload import PlanChoice, Precision, Recompute, choice_problems

_RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
_PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16", "fp16", "fp8")


@dataclass(frozen=True, slots=True)
class PlanChange:
    """One change, and the plan with it."""

    what: str
    """``recompute = full``"""
    plan: Plan
    effort: int
    """The order in which changes are tried first: settings before axes, axes before what is only planned."""

    @property
    def planned_only(self) -> tuple[str, ...]:
        return planned_only(self.plan.choice)


def single_changes(plan: Plan, question: PlanQuestion, estimator: PlanEstimator) -> list[PlanChange]:
    """Fastest first."""
    found: dict[PlanChoice, PlanChange] = {}
    for what, choice, effort in _changed(plan.choice, question):
        if choice != plan.choice and is_legal(choice, question):
            found.setdefault(choice, PlanChange(what, estimator.plan(choice), effort))
    return sorted(found.values(), key=lambda change: change.plan.step.seconds)


def smallest_fitting_change(plan: Plan, question: PlanQuestion, estimator: PlanEstimator) -> PlanChange | None:
    """The change of least effort with which the plan fits; of those the fastest. None if no single one is enough."""
    fitting = [change for change in single_changes(plan, question, estimator) if change.plan.fits]
    return min(fitting, key=lambda change: (change.effort, change.plan.step.seconds), default=None)


def is_legal(choice: PlanChoice, question: PlanQuestion) -> bool:
    """Legal for the model and the batch; the axes that are only planned are checked for what they split."""
    needs = replace(question.constraints, micro_batch=choice.micro_batch)
    cluster, layout = question.cluster, choice.layout
    if choice.precision not in cluster.device.peak_flops or layout.num_ranks > cluster.num_devices:
        return False
    if choice.micro_batch > needs.global_batch or (layout.context > 1 and not _splits_context(layout, needs)):
        return False
    if choice_problems(question.workload, choice, layout.num_ranks):
        return False
    return not legal_problems(replace(layout, context=1, expert=1), needs)


def _splits_context(layout: Layout, needs: LayoutConstraints) -> bool:
    return needs.seq_len > 0 and needs.seq_len % (2 * layout.context) == 0


def _changed(choice: PlanChoice, question: PlanQuestion) -> Iterator[tuple[str, PlanChoice, int]]:
    for recompute in _RECOMPUTE:
        yield f"recompute = {recompute}", replace(choice, recompute=recompute), 1
    for size in (choice.micro_batch // 2, 2 * choice.micro_batch):
        if size:
            yield f"micro_batch = {size}", replace(choice, micro_batch=size), 1
    for precision in _PRECISIONS:
        yield f"precision = {precision}", replace(choice, precision=precision), 9 if precision == "fp8" else 2
    yield f"compile = {str(not choice.compiled).lower()}", replace(choice, compiled=not choice.compiled), 2
    for layout, effort in _changed_layouts(choice.layout, question.cluster.devices_per_host):
        yield _difference(choice.layout, layout), replace(choice, layout=layout), effort
    twice, num_experts = 2 * choice.layout.expert, question.workload.num_experts
    if num_experts and num_experts % twice == 0 and choice.layout.data % twice == 0:
        yield f"expert = {twice}", replace(choice, layout=replace(choice.layout, expert=twice)), 9
    yield "offload", replace(choice, offload=not choice.offload), 9


def _changed_layouts(layout: Layout, per_host: int) -> Iterator[tuple[Layout, int]]:
    if layout.data > 1:
        for zero in range(4):
            yield replace(layout, zero=zero, shard=layout.shard if zero == 3 else 0), 3
        if layout.zero == 3:
            yield replace(layout, shard=0 if layout.shard else max(per_host // layout.tensor, 1)), 4
    if layout.pipeline > 1:
        for schedule in SCHEDULES:
            yield replace(layout, schedule=schedule), 3
    for axis, effort in (("tensor", 5), ("pipeline", 6), ("context", 9)):
        size = getattr(layout, axis)
        if layout.data % 2 == 0 and (axis != "tensor" or per_host % (2 * size) == 0):
            yield _traded(layout, axis, 2 * size, layout.data // 2), effort
        if size % 2 == 0:
            yield _traded(layout, axis, size // 2, 2 * layout.data), effort


def _traded(layout: Layout, axis: str, size: int, data: int) -> Layout:
    shard = layout.shard if layout.shard and data % layout.shard == 0 and layout.shard < data else 0
    schedule = "1f1b" if axis == "pipeline" and size == 1 else layout.schedule
    zero = layout.zero if data > 1 else 0
    changes: dict[str, int] = {axis: size}
    return replace(layout, data=data, zero=zero, shard=shard if zero else 0, schedule=schedule, **changes)


def _difference(old: Layout, new: Layout) -> str:
    """``tensor = 4`` (the data axis gives or takes the ranks)."""
    names = ("tensor", "pipeline", "context", "schedule", "zero", "shard")
    changed = [f"{name} = {getattr(new, name)}" for name in names if getattr(new, name) != getattr(old, name)]
    return ", ".join(changed)
