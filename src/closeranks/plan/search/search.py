"""Which plan should a job run under on a cluster? Estimates every choice of a space, and ranks those that fit.

The time of a step is estimated for every choice; memory, which costs more to estimate, for the fastest ones only, in
the order of their time, until enough layouts have been found that fit. A layout is listed once, with the best
micro-batch, recompute and schedule for it. Invariant: no choice that is faster than a listed one was left out because
of anything but memory, and those are kept with the bytes by which they miss.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from closeranks.facts.calibration import Calibration
from closeranks.facts.cluster import Cluster
from closeranks.facts.layout import Layout, LayoutConstraints
from closeranks.plan.memory.estimate import MemoryEstimate, MemoryEstimator
from closeranks.plan.search.space import SearchSpace, candidate_choices, complexity
from closeranks.plan.step_time.estimate import StepEstimate, StepEstimator
from closeranks.plan.step_time.workload import PlanChoice, Workload

FITS, BORDERLINE, TOO_BIG = "fits", "borderline", "does not fit"
_MOST_TRIED = 4000
"""Choices whose memory is estimated, at most, once one of them fits."""
_KEPT_MISSES = 5


@dataclass(frozen=True, slots=True)
class PlanQuestion:
    workload: Workload
    constraints: LayoutConstraints
    cluster: Cluster
    template: PlanChoice
    """The job's own choice: it gives what the space does not vary."""
    space: SearchSpace = field(default_factory=SearchSpace)
    calibration: Calibration | None = None
    margin: float = 0.02
    """A simpler plan is preferred if a more complex one gains less than this share."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A choice with its estimates."""

    choice: PlanChoice
    step: StepEstimate
    memory: MemoryEstimate

    @property
    def fits(self) -> bool:
        return self.memory.verdict == FITS

    @property
    def complexity(self) -> int:
        return complexity(self.choice)


@dataclass(frozen=True, slots=True)
class SearchResult:
    question: PlanQuestion
    num_choices: int
    num_layouts: int
    """Legal ones, schedules aside."""
    plans: tuple[Plan, ...]
    """The best plan of each layout that fits, fastest first."""
    misses: tuple[Plan, ...]
    """Faster than all of those, but too big: the smallest of each layout, those that miss by least first."""
    closest: Plan | None = None
    """If nothing fits: what misses by the fewest bytes."""

    @property
    def fastest(self) -> Plan | None:
        return self.plans[0] if self.plans else None

    @property
    def winner(self) -> Plan | None:
        """The simplest of the plans within the margin of the fastest one; of equally simple ones the fastest."""
        return simplest_within(self.plans, self.question.margin)


def simplest_within(plans: Sequence[Plan], margin: float) -> Plan | None:
    if not plans:
        return None
    limit = min(plan.step.seconds for plan in plans) * (1 + margin)
    near = [plan for plan in plans if plan.step.seconds <= limit]
    return min(near, key=lambda plan: (plan.complexity, plan.step.seconds))


@dataclass(slots=True)
class PlanEstimator:
    """Estimates single choices; what choices share is computed once."""

    question: PlanQuestion
    steps: StepEstimator = field(init=False)
    memory: MemoryEstimator = field(init=False)

    def __post_init__(self) -> None:
        asked = self.question
        self.steps = StepEstimator(asked.workload, asked.cluster, asked.calibration)
        self.memory = MemoryEstimator(asked.workload, asked.cluster)

    def plan(self, choice: PlanChoice, step: StepEstimate | None = None) -> Plan:
        return Plan(choice, step or self.steps.estimate(choice), self.memory.estimate(choice))


def search_plans(question: PlanQuestion, limit: int = 10) -> SearchResult:
    """``limit``: layouts to find that fit; 0: all of them."""
    cluster = question.cluster
    estimator = PlanEstimator(question)
    choices = candidate_choices(
        question.space, question.constraints, question.template, cluster.num_devices, cluster.domain_size
    )
    timed = sorted(((estimator.steps.estimate(one), one) for one in choices), key=lambda pair: pair[0].seconds)
    walk = _Walk(estimator, question.margin, limit)
    walk.over(timed)
    return SearchResult(
        question=question,
        num_choices=len(timed),
        num_layouts=len({layout_key(choice.layout) for _, choice in timed}),
        plans=tuple(sorted(walk.best_of_each(), key=lambda plan: plan.step.seconds)),
        misses=tuple(sorted(walk.misses.values(), key=_bytes_of)[:_KEPT_MISSES]),
        closest=None if walk.found else walk.closest,
    )


def layout_key(layout: Layout) -> Layout:
    """A layout without its schedule: what a row of a listing stands for."""
    return replace(layout, schedule="1f1b")


def _bytes_of(plan: Plan | None) -> float:
    return math.inf if plan is None else plan.memory.total_bytes


@dataclass(slots=True)
class _Walk:
    """Goes through choices from the fastest on, and collects those that fit by layout."""

    estimator: PlanEstimator
    margin: float
    limit: int
    found: dict[Layout, list[Plan]] = field(default_factory=dict)
    misses: dict[Layout, Plan] = field(default_factory=dict)
    closest: Plan | None = None

    def over(self, timed: Iterable[tuple[StepEstimate, PlanChoice]]) -> None:
        num_tried = 0
        for step, choice in timed:
            key = layout_key(choice.layout)
            fitting = self.found.get(key)
            if fitting and step.seconds > fitting[0].step.seconds * (1 + self.margin):
                continue
            if self.limit and not fitting and len(self.found) >= self.limit:
                if step.seconds > self._latest_s() * (1 + self.margin):
                    break
                continue
            if num_tried >= _MOST_TRIED and self.found:
                break
            num_tried += 1
            self._try(key, self.estimator.plan(choice, step))

    def _latest_s(self) -> float:
        return max(plans[0].step.seconds for plans in self.found.values())

    def _try(self, key: Layout, plan: Plan) -> None:
        if plan.fits:
            self.found.setdefault(key, []).append(plan)
            return
        if not self.found and _bytes_of(plan) < _bytes_of(self.misses.get(key)):
            self.misses[key] = plan
        if _bytes_of(plan) < _bytes_of(self.closest):
            self.closest = plan

    def best_of_each(self) -> list[Plan]:
        chosen = (simplest_within(plans, self.margin) for plans in self.found.values())
        return [plan for plan in chosen if plan is not None]
