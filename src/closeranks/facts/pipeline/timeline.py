"""Simulates a schedule in time: its duration, its bubbles, and how many micro-batches it holds.

Stages are assumed to be equal and messages to take no time: what remains is the cost of the order itself. Invariant: no
action starts before its rank is free and before everything it needs has ended, and none starts later than that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from closeranks.core.errors import UserError
from closeranks.facts.pipeline.actions import Action, ActionKind, completed_actions, dependencies
from closeranks.facts.pipeline.schedules import PipelineSchedule
from closeranks.facts.pipeline.zero_bubble import peak_held


@dataclass(frozen=True, slots=True)
class ActionCosts:
    """The time of one stage's work on one micro-batch, in any unit."""

    forward: float = 1.0
    backward: float = 2.0
    """Both parts at once."""
    input: float = 1.0
    weight: float = 1.0

    def of(self, kind: ActionKind) -> float:
        return {"F": self.forward, "B": self.backward, "I": self.input, "W": self.weight}[kind]


@dataclass(frozen=True, slots=True)
class ActionSpan:
    """When an action runs."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """A schedule with the start and end of every action."""

    schedule: PipelineSchedule
    ranks: tuple[tuple[ActionSpan, ...], ...]

    @property
    def makespan(self) -> float:
        return max((spans[-1].end for spans in self.ranks if spans), default=0.0)

    @property
    def idle(self) -> tuple[float, ...]:
        """How long each rank waits between the first start and the last end over all ranks."""
        return tuple(self.makespan - sum(span.end - span.start for span in spans) for spans in self.ranks)

    @property
    def bubble(self) -> float:
        """The share of all ranks' time that is spent waiting."""
        return sum(self.idle) / (self.makespan * len(self.ranks))


def timeline(schedule: PipelineSchedule, costs: ActionCosts | None = None) -> Timeline:
    """Starts every action as early as the order allows; raises where the order deadlocks."""
    action_costs, num_stages = costs or ActionCosts(), schedule.num_stages
    ends: dict[Action, float] = {}
    rows: list[list[ActionSpan]] = [[] for _ in schedule.ranks]
    while True:
        num_before = len(ends)
        for actions, row in zip(schedule.ranks, rows, strict=True):
            for action in actions[len(row) :]:
                required = dependencies(action, num_stages)
                if not all(need in ends for need in required):
                    break
                start = max([ends[need] for need in required] + [row[-1].end if row else 0.0])
                row.append(ActionSpan(action, start, start + action_costs.of(action.kind)))
                ends.update(dict.fromkeys(completed_actions(action), row[-1].end))
        if len(ends) == num_before:
            break
    _refuse_stuck(schedule, rows)
    return Timeline(schedule, tuple(map(tuple, rows)))


def _refuse_stuck(schedule: PipelineSchedule, rows: list[list[ActionSpan]]) -> None:
    for rank, (actions, row) in enumerate(zip(schedule.ranks, rows, strict=True)):
        if len(row) < len(actions):
            what = f"schedule {schedule.name} stops: rank {rank} waits forever for what {actions[len(row)]} needs"
            raise UserError(what, "Correct its order; validate says what is wrong with it.")


def peak_in_flight(schedule: PipelineSchedule) -> tuple[int, ...]:
    """For each rank, the peak number of (stage, micro-batch) pairs whose activations it holds at once.

    They are held from the forward until the whole backward, or until the weight gradient where it is split.
    """
    return tuple(peak_held(actions) for actions in schedule.ranks)


def ideal_bubble(num_ranks: int, num_micro: int) -> float:
    """The bubble of GPipe and 1F1B: (P - 1) / (M + P - 1)."""
    return (num_ranks - 1) / (num_micro + num_ranks - 1)


def spans_by_end(laid_out: Timeline) -> Iterator[ActionSpan]:
    """All spans in the order in which they end. Of those that end together, forwards are in ascending order of stages
    and backwards in descending order, so that each comes before the action that reads its result."""

    def order(span: ActionSpan) -> tuple[float, bool, int]:
        is_forward = span.action.kind == "F"
        return span.end, not is_forward, span.action.stage if is_forward else -span.action.stage

    yield from sorted((span for spans in laid_out.ranks for span in spans), key=order)
