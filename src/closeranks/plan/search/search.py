"""Which plan should a job run under on a cluster? Estimates every choice of a space, and ranks those that fit.

Choices are estimated in the order of their time, until enough layouts have been found that fit: what a choice computes
bounds its step from below, so those that are certainly slower are never estimated. A layout is listed once, with the
best micro-batch, recompute and schedule for it. Invariant: no choice that is faster than a listed one was left out
because of anything but memory, and of those whose state alone is not too big the nearest are kept with the bytes by
which they miss.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import InitVar, dataclass, field, replace
from heapq import heappop, heappush

from closeranks.facts.cluster import Cluster
from closeranks.facts.layout import Layout, LayoutConstraints
from closeranks.plan.memory.estimate import MemoryEstimate, MemoryEstimator
from closeranks.plan.search.space import SearchSpace, candidate_choices, complexity
from closeranks.plan.step_time.estimate import StepEstimate, StepEstimator
from closeranks.plan.step_time.workload import PlanChoice, Workload

FITS, BORDERLINE, TOO_BIG = "fits", "borderline", "does not fit"
_KEPT_MISSES = 5


@dataclass(frozen=True, slots=True)
class PlanQuestion:
    workload: Workload
    constraints: LayoutConstraints
    cluster: Cluster
    template: PlanChoice
    """The job's own choice: it gives what the space does not vary."""
    space: SearchSpace = field(default_factory=SearchSpace)
    margin: float = 0.02
    """A simpler plan is preferred if a more complex one gains less than this share."""


def with_batch(question: PlanQuestion, global_batch: int) -> PlanQuestion:
    return replace(
        question,
        workload=replace(question.workload, global_batch=global_batch),
        constraints=replace(question.constraints, global_batch=global_batch),
    )


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
    fastest: Plan | None = None
    """Of those that fit, also where it is not listed."""
    winner: Plan | None = None
    """The simplest within the margin of the fastest one, of equally simple ones the fastest; always listed."""


def simplest_within(plans: Iterable[Plan], most_s: float) -> Plan | None:
    """Of the plans with steps of at most so many seconds; of equally simple ones the fastest."""
    near = (plan for plan in plans if plan.step.seconds <= most_s)
    return min(near, key=lambda plan: (plan.complexity, plan.step.seconds), default=None)


@dataclass(slots=True)
class PlanEstimator:
    """Estimates single choices; what choices share is computed once."""

    question: PlanQuestion
    shares: InitVar[PlanEstimator | None] = None
    """One for the same model on another number of devices, or with another batch: what both need is computed once."""
    steps: StepEstimator = field(init=False)
    memory: MemoryEstimator = field(init=False)

    def __post_init__(self, shares: PlanEstimator | None) -> None:
        asked = self.question
        known = None if shares is None else shares.steps
        self.steps = StepEstimator(asked.workload, asked.cluster, shares=known)
        self.memory = MemoryEstimator(asked.workload, asked.cluster)

    def plan(self, choice: PlanChoice, step: StepEstimate | None = None) -> Plan:
        return Plan(choice, step or self.steps.estimate(choice), self.memory.estimate(choice))


def search_plans(question: PlanQuestion, limit: int = 10, estimator: PlanEstimator | None = None) -> SearchResult:
    """``limit``: layouts to find that fit; 0: all of them."""
    cluster = question.cluster
    estimator = estimator or PlanEstimator(question)
    choices = list(
        candidate_choices(
            question.space, question.constraints, question.template, cluster.num_devices, cluster.domain_size
        )
    )
    walk = _Walk(estimator, question.margin, limit)
    walk.over(_fastest_first([choice for choice in choices if estimator.memory.may_fit(choice)], estimator.steps))
    if not walk.found:
        walk.over(_fastest_first(choices, estimator.steps))
    rows = sorted(walk.best_of_each(), key=lambda plan: plan.step.seconds)
    winner = simplest_within(rows, walk.near_s)
    if limit and winner not in rows[:limit]:
        rows[limit - 1 :] = [] if winner is None else [winner]
    return SearchResult(
        question=question,
        num_choices=len(choices),
        num_layouts=len({layout_key(choice.layout) for choice in choices}),
        plans=tuple(rows[:limit] if limit else rows),
        misses=tuple(sorted(walk.misses.values(), key=_bytes_of)[:_KEPT_MISSES]),
        closest=None if walk.found else walk.closest,
        fastest=walk.fastest,
        winner=winner,
    )


def _fastest_first(choices: Sequence[PlanChoice], steps: StepEstimator) -> Iterator[tuple[StepEstimate, PlanChoice]]:
    """A choice comes when no other one can be faster: those that were not estimated have larger bounds."""
    bounds = sorted((steps.least_seconds(choice), place) for place, choice in enumerate(choices))
    waiting: list[tuple[float, int, StepEstimate]] = []
    for bound, place in bounds:
        while waiting and waiting[0][0] < bound:
            _, ready, step = heappop(waiting)
            yield step, choices[ready]
        step = steps.estimate(choices[place])
        heappush(waiting, (step.seconds, place, step))
    while waiting:
        _, ready, step = heappop(waiting)
        yield step, choices[ready]


LayoutKey = tuple[int, ...]


def layout_key(layout: Layout) -> LayoutKey:
    """A layout without its schedule: what a row of a listing stands for."""
    return layout.data, layout.zero, layout.shard, layout.tensor, layout.pipeline, layout.context, layout.expert


def _bytes_of(plan: Plan | None) -> float:
    return math.inf if plan is None else plan.memory.total_bytes


@dataclass(slots=True)
class _Walk:
    """Goes through choices from the fastest on, and collects those that fit by layout."""

    estimator: PlanEstimator
    margin: float
    limit: int
    found: dict[LayoutKey, list[Plan]] = field(default_factory=dict)
    misses: dict[LayoutKey, Plan] = field(default_factory=dict)
    closest: Plan | None = None

    def over(self, timed: Iterable[tuple[StepEstimate, PlanChoice]]) -> None:
        for step, choice in timed:
            key = layout_key(choice.layout)
            fitting = self.found.get(key)
            if fitting and step.seconds > fitting[0].step.seconds * (1 + self.margin):
                continue
            if self.limit and not fitting and len(self.found) >= self.limit:
                if step.seconds > self._latest_s() * (1 + self.margin):
                    break
                if step.seconds > self.near_s:
                    continue
            self._try(key, self.estimator.plan(choice, step))

    @property
    def fastest(self) -> Plan | None:
        """The first that fitted."""
        return next((plans[0] for plans in self.found.values()), None)

    @property
    def near_s(self) -> float:
        """Up to where a plan is as good as the fastest one."""
        return 0.0 if self.fastest is None else self.fastest.step.seconds * (1 + self.margin)

    def _latest_s(self) -> float:
        return max(plans[0].step.seconds for plans in self.found.values())

    def _try(self, key: LayoutKey, plan: Plan) -> None:
        if plan.fits:
            self.found.setdefault(key, []).append(plan)
            return
        if not self.found and _bytes_of(plan) < _bytes_of(self.misses.get(key)):
            self.misses[key] = plan
        if _bytes_of(plan) < _bytes_of(self.closest):
            self.closest = plan

    def best_of_each(self) -> list[Plan]:
        """Of each layout the simplest plan within the margin: of the fastest one of all, where it reaches that."""
        chosen = (simplest_within(plans, self._most_s(plans[0])) for plans in self.found.values())
        return [plan for plan in chosen if plan is not None]

    def _most_s(self, fastest: Plan) -> float:
        own_s = fastest.step.seconds
        return self.near_s if own_s <= self.near_s else own_s * (1 + self.margin)
