"""Occupancy of a pipeline: the peak number of micro-batches in each stage, and the bubble.

[Note: how a backward is split] A schedule may divide backwards into input gradients (``I``) and weight gradients
(``W``). What a run then does depends on its blocks. ``split``: as the schedule says. ``late``: the first half computes
nearly all gradients, since products in half precision are Python autograd functions, and the second half frees the
activations. ``whole``: the first half does everything, since blocks are recomputed or compiled.

For the two plain schedules both have closed forms; the others are simulated. Invariant: the numbers are those of the
schedule that runs; only beyond ``_LONG`` rounds of micro-batches are they extrapolated from a shorter schedule of the
same kind, whose peak and idle time no longer grow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

from closeranks.facts.layout import Layout
from closeranks.facts.pipeline.actions import Action
from closeranks.facts.pipeline.schedules import PipelineSchedule, schedule_for
from closeranks.facts.pipeline.timeline import ActionCosts, ideal_bubble, timeline

BackwardSplitting = Literal["split", "late", "whole"]

_LONG = 4
_GROWING = frozenset({"gpipe", "looped-bfs"})
"""Schedules that hold every micro-batch of the step, so that a shorter one cannot be extrapolated."""


_FIRST_HALF_ALONE = ActionCosts(input=2.0, weight=0.0)
_DEFERRED_SHARE = 0.5
"""What a deferred weight gradient keeps, as a share of a micro-batch's activations: to find the fullest moment."""


@dataclass(frozen=True, slots=True)
class StagesHeld:
    """Of one rank at one moment, by stage."""

    held: dict[int, int]
    """Micro-batches whose activations are there."""
    deferred: dict[int, int]
    """Those of them whose weight gradients are still to come."""


@dataclass(frozen=True, slots=True)
class PipelineOccupancy:
    in_flight: tuple[dict[int, int], ...]
    """For each pipeline rank: its stages, and the number of micro-batches that each holds when these are most."""
    fullest: tuple[StagesHeld, ...]
    """When a rank's memory is fullest: what is recorded for deferred weight gradients counts too."""
    bubble: float
    """Share of all ranks' time that is spent waiting, with equal stages and messages that take no time."""


@cache
def pipeline_occupancy(
    pipeline: int, schedule: str, num_micro: int, splitting: BackwardSplitting = "split"
) -> PipelineOccupancy:
    """``num_micro`` is the number of micro-batches that one data rank processes in a step."""
    if pipeline == 1:
        return _plain(({0: 1},), 0.0)
    if schedule == "gpipe":
        return _plain(tuple({rank: num_micro} for rank in range(pipeline)), ideal_bubble(pipeline, num_micro))
    if schedule == "1f1b":
        rows = tuple({rank: min(num_micro, pipeline - rank)} for rank in range(pipeline))
        return _plain(rows, ideal_bubble(pipeline, num_micro))
    return _simulated(pipeline, schedule, num_micro, splitting)


def layout_occupancy(layout: Layout, num_micro: int, splitting: BackwardSplitting = "split") -> PipelineOccupancy:
    return pipeline_occupancy(layout.pipeline, layout.schedule, num_micro, splitting)


def _plain(in_flight: tuple[dict[int, int], ...], bubble: float) -> PipelineOccupancy:
    return PipelineOccupancy(in_flight, tuple(StagesHeld(row, dict.fromkeys(row, 0)) for row in in_flight), bubble)


def _simulated(pipeline: int, schedule: str, num_micro: int, splitting: BackwardSplitting) -> PipelineOccupancy:
    rounds = num_micro // pipeline
    is_short = rounds <= _LONG or schedule in _GROWING
    shown = num_micro if is_short else _LONG * pipeline + num_micro % pipeline
    made = schedule_for(schedule, pipeline, shown)
    simulated = timeline(made, None if splitting == "split" else _FIRST_HALF_ALONE)
    # Once the pipeline is full, every further micro-batch adds work and no waiting.
    idle = sum(simulated.idle)
    busy = (simulated.makespan * pipeline - idle) * num_micro / shown
    rows = tuple(fullest_moment(actions, splitting, deferred_share=0.0).held for actions in made.ranks)
    return PipelineOccupancy(rows, fullest_moments(made, splitting), idle / (idle + busy))


def fullest_moments(made: PipelineSchedule, splitting: BackwardSplitting) -> tuple[StagesHeld, ...]:
    """By rank."""
    share = _DEFERRED_SHARE if splitting == "split" else 0.0
    return tuple(fullest_moment(actions, splitting, deferred_share=share) for actions in made.ranks)


def fullest_moment(actions: Sequence[Action], splitting: BackwardSplitting, *, deferred_share: float) -> StagesHeld:
    """Micro-batches held by each stage of one rank, from forward to the end of backward, when their sum is largest."""
    held: Counter[int] = Counter({action.stage: 0 for action in actions})
    deferred: Counter[int] = Counter(held)
    best, most = StagesHeld(dict(held), dict(deferred)), (0.0, 0)
    frees = "BI" if splitting == "whole" else "BW"
    for action in actions:
        held[action.stage] += (action.kind == "F") - (action.kind in frees)
        if splitting != "whole":
            deferred[action.stage] += (action.kind == "I") - (action.kind == "W")
        num_deferred = deferred.total()
        size = (held.total() + deferred_share * num_deferred, num_deferred)
        if size > most:
            best, most = StagesHeld(dict(held), dict(deferred)), size
    return best
