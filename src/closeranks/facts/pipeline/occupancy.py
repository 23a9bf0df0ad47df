"""Occupancy of a pipeline: the peak number of micro-batches in each stage, and the bubble.

For the two plain schedules both have closed forms; the others are simulated. Invariant: the numbers are those of the
schedule that runs; only beyond ``_LONG`` rounds of micro-batches are they extrapolated from a shorter schedule of the
same kind, whose peak and idle time no longer grow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from closeranks.facts.layout import Layout
from closeranks.facts.pipeline.actions import Action
from closeranks.facts.pipeline.schedules import schedule_for
from closeranks.facts.pipeline.timeline import ideal_bubble, timeline

_LONG = 4
_GROWING = frozenset({"gpipe", "looped-bfs"})
"""Schedules that hold every micro-batch of the step, so that a shorter one cannot be extrapolated."""


@dataclass(frozen=True, slots=True)
class PipelineOccupancy:
    in_flight: tuple[dict[int, int], ...]
    """For each pipeline rank: its stages, and the number of micro-batches that each holds at the rank's peak."""
    bubble: float
    """Share of all ranks' time that is spent waiting, with equal stages and messages that take no time."""


@cache
def pipeline_occupancy(pipeline: int, schedule: str, num_micro: int) -> PipelineOccupancy:
    """``num_micro`` is the number of micro-batches that one data rank processes in a step."""
    if pipeline == 1:
        return PipelineOccupancy(({0: 1},), 0.0)
    if schedule == "gpipe":
        return PipelineOccupancy(
            tuple({rank: num_micro} for rank in range(pipeline)), ideal_bubble(pipeline, num_micro)
        )
    if schedule == "1f1b":
        rows = tuple({rank: min(num_micro, pipeline - rank)} for rank in range(pipeline))
        return PipelineOccupancy(rows, ideal_bubble(pipeline, num_micro))
    return _simulated(pipeline, schedule, num_micro)


def layout_occupancy(layout: Layout, num_micro: int) -> PipelineOccupancy:
    return pipeline_occupancy(layout.pipeline, layout.schedule, num_micro)


def _simulated(pipeline: int, schedule: str, num_micro: int) -> PipelineOccupancy:
    rounds = num_micro // pipeline
    is_short = rounds <= _LONG or schedule in _GROWING
    shown = num_micro if is_short else _LONG * pipeline + num_micro % pipeline
    made = schedule_for(schedule, pipeline, shown)
    simulated = timeline(made)
    # Once the pipeline is full, every further micro-batch adds work and no waiting.
    idle = sum(simulated.idle)
    busy = (simulated.makespan * pipeline - idle) * num_micro / shown
    return PipelineOccupancy(tuple(map(peak_by_stage, made.ranks)), idle / (idle + busy))


def peak_by_stage(actions: Sequence[Action]) -> dict[int, int]:
    """Micro-batches held by each stage of one rank, from forward to the end of backward, when their sum is largest."""
    held: Counter[int] = Counter({action.stage: 0 for action in actions})
    best = dict(held)
    for action in actions:
        held[action.stage] += (action.kind == "F") - (action.kind in "BW")
        if sum(held.values()) > sum(best.values()):
            best = dict(held)
    return best
