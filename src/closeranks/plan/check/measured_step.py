"""Where did the time of a measured step go, in the groups in which a plan and a run can be compared?

A run measures phases, a plan estimates parts; neither divides the time as the other does. Each group has the phases of
the one and the parts of the other that mean the same work. Invariant: the groups of a step add up to its seconds; what
no plan contains (saves, evaluations, compiling) is kept apart.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

from closeranks.core import phases
from closeranks.core.events import RunStarted, StepPhases

COMPUTE = "forward and backward"
DATA_AXIS, TENSOR_AXIS, PIPELINE_AXIS = "data axis", "tensor axis", "pipeline axis"
OPTIMIZER, INPUT, OVERHEAD = "optimizer", "waiting for data", "everything else"
GROUPS = (COMPUTE, TENSOR_AXIS, PIPELINE_AXIS, DATA_AXIS, OPTIMIZER, INPUT, OVERHEAD)

_PHASES = {
    phases.FORWARD: COMPUTE,
    phases.BACKWARD: COMPUTE,
    phases.OPTIMIZER: OPTIMIZER,
    phases.DATA: INPUT,
    phases.HOST_TO_DEVICE: INPUT,
}
_AXES = {"data": DATA_AXIS, "shard": DATA_AXIS, "replica": DATA_AXIS, "tensor": TENSOR_AXIS, "pipeline": PIPELINE_AXIS}
_UNPLANNED = frozenset({phases.SAVE, phases.SNAPSHOT, phases.EVALUATION, phases.COMPILE, phases.TRACE})
_PARTS = {
    "compute: products": COMPUTE,
    "compute: attention": COMPUTE,
    "compute: memory-bound": COMPUTE,
    "recompute": COMPUTE,
    "loss": COMPUTE,
    "launches": COMPUTE,
    "tensor communication": TENSOR_AXIS,
    "pipeline bubble": PIPELINE_AXIS,
    "pipeline sends": PIPELINE_AXIS,
    "data communication": DATA_AXIS,
    "waiting for ranks": DATA_AXIS,
    "optimizer": OPTIMIZER,
    "data": INPUT,
}


@dataclass(frozen=True, slots=True)
class StepGroups:
    """The mean step of a run."""

    seconds: float
    """Without what no plan contains."""
    groups: Mapping[str, float]
    unplanned: Mapping[str, float] = field(default_factory=dict)
    """By phase: saves, evaluations and the like."""


def comparable_steps(
    starts: Sequence[RunStarted], times: Mapping[int, Mapping[int, StepPhases]], left_out: Collection[int] = ()
) -> dict[int, tuple[StepPhases, ...]]:
    """By rank, the steps in the layout that the run had last: one that lost a worker may have gone on with fewer.

    ``times``: by rank, then by step. ``left_out``: steps that do not count; nor does the last one of the job."""
    last = starts[-1]
    since = last.first_step
    for one in reversed(starts):
        if (one.world_size, one.layout) != (last.world_size, last.layout):
            break
        since = one.first_step
    own = {rank: steps for rank, steps in sorted(times.items()) if rank < last.world_size}
    common = frozenset.intersection(*map(frozenset, own.values())) if own else frozenset()
    counted = sorted(step for step in common - {*left_out, last.last_step} if step >= since)
    return {rank: tuple(steps[step] for step in counted) for rank, steps in own.items()} if counted else {}


def measured_step(phase_s: Mapping[str, float]) -> StepGroups:
    """``phase_s``: mean seconds of a step by phase, which add up to the step."""
    groups = dict.fromkeys(GROUPS, 0.0)
    unplanned = {}
    for name, seconds in phase_s.items():
        if name in _UNPLANNED:
            unplanned[name] = seconds
        else:
            groups[_group_of_phase(name)] += seconds
    return StepGroups(sum(groups.values()), groups, unplanned)


def typical_step(times: Mapping[int, Sequence[StepPhases]]) -> StepGroups:
    """The median step, in which one that something disturbed counts little; ``times``: by rank, the same steps for
    each."""
    steps = []
    for ranks in zip(*times.values(), strict=True):
        names = dict.fromkeys(name for one in ranks for name in one.phases)
        steps.append(measured_step({name: fmean(one.phases.get(name, 0.0) for one in ranks) for name in names}))
    return middle_step(steps)


def middle_step(steps: Sequence[StepGroups]) -> StepGroups:
    """The median of several measurements of one step."""
    seconds = median(step.seconds for step in steps)
    middle = {group: median(step.groups[group] for step in steps) for group in GROUPS}
    # Medians of groups do not add up to that of the steps.
    scale = seconds / total if (total := sum(middle.values())) else 1.0
    unplanned = dict.fromkeys(name for step in steps for name in step.unplanned)
    means = {name: fmean(step.unplanned.get(name, 0.0) for step in steps) for name in unplanned}
    return StepGroups(seconds, {group: scale * value for group, value in middle.items()}, means)


def _group_of_phase(name: str) -> str:
    axis, dot, _ = name.partition(".")
    return _AXES.get(axis, OVERHEAD) if dot else _PHASES.get(name, OVERHEAD)


def planned_groups(parts: Mapping[str, float]) -> dict[str, float]:
    """``parts``: those of a ``StepEstimate``, by name."""
    groups = dict.fromkeys(GROUPS, 0.0)
    for name, seconds in parts.items():
        groups[_PARTS.get(name, OVERHEAD)] += seconds
    return groups
