"""How many micro-batches does a pipeline rank hold when its memory is fullest? For searches over many layouts.

In closed form for 1F1B, interleaved or not; schedules that split backwards are simulated, on at most ``_SIMULATED``
ranks. Invariant: the numbers are those of the schedules that train (``facts.pipeline.occupancy``, which simulates them
all).
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from closeranks.facts.layout import Layout
from closeranks.facts.pipeline.occupancy import BackwardSplitting, fullest_moments
from closeranks.facts.pipeline.schedules import schedule_for

_HOLD_ALL = frozenset({"gpipe", "looped-bfs"})
SPLIT_SCHEDULES = frozenset({"interleaved-zero-bubble", "zbv", "dualpipev"})
_SIMULATED = 8
"""More ranks hold their micro-batches in the same proportions."""
_ROUNDS = 4
"""Rounds of micro-batches after which a rank holds no more of them."""


class StageHeld(NamedTuple):
    """Of one stage, in micro-batches."""

    held: float
    deferred: float = 0.0
    """Of those held: whose weight gradients are still to come."""


def stages_held(
    layout: Layout, rank: int, num_micro: int, stages_per_rank: int, splitting: BackwardSplitting = "split"
) -> tuple[StageHeld, ...]:
    """By stage of a rank."""
    if layout.pipeline == 1:
        return (StageHeld(1.0),)
    if layout.schedule in _HOLD_ALL:
        return (StageHeld(float(num_micro)),) * stages_per_rank
    if layout.schedule in SPLIT_SCHEDULES:
        return _simulated(layout.schedule, layout.pipeline, rank, num_micro, splitting)
    return tuple(StageHeld(float(held)) for held in stages_in_flight(layout, rank, num_micro, stages_per_rank))


def stages_in_flight(layout: Layout, rank: int, num_micro: int, stages_per_rank: int) -> tuple[int, ...]:
    """By stage of a rank, for 1f1b, interleaved or not: the first one begins most micro-batches ahead. Micro-batches
    that are no multiple of the ranks go in larger groups, which may differ by one."""
    size, last = layout.pipeline, stages_per_rank - 1
    if not last:
        return (min(num_micro, size - rank),)
    rounds = max(1, num_micro // size)
    least, group = max(size, num_micro) // rounds, -(-max(size, num_micro) // rounds)
    total = 2 * (size - rank - 1) + last * group + 1
    at_end = min(least, total - last * group + (group - least))
    first = total - at_end - (last - 1) * group
    return tuple(min(num_micro, held) for held in (first, *[group] * (last - 1), at_end))


def _simulated(
    schedule: str, pipeline: int, rank: int, num_micro: int, splitting: BackwardSplitting
) -> tuple[StageHeld, ...]:
    size = min(pipeline, _SIMULATED)
    factor = pipeline / size
    shown = max(1, round(num_micro / factor))
    shown = min(shown, _ROUNDS * size + shown % size)
    rows = _moments(schedule, size, shown, splitting)
    row = rows[round(rank * (size - 1) / (pipeline - 1))]
    return tuple(StageHeld(min(num_micro, factor * one.held), min(num_micro, factor * one.deferred)) for one in row)


@cache
def _moments(
    schedule: str, size: int, num_micro: int, splitting: BackwardSplitting
) -> tuple[tuple[StageHeld, ...], ...]:
    moments = fullest_moments(schedule_for(schedule, size, num_micro), splitting)
    return tuple(tuple(StageHeld(one.held[stage], one.deferred[stage]) for stage in one.held) for one in moments)


def heads_held(layout: Layout, num_micro: int, last: StageHeld, splitting: BackwardSplitting) -> float:
    """Micro-batches of which the last stage (``last``) holds logits: mostly their backward follows at once."""
    if layout.pipeline == 1:
        return 1.0
    if layout.schedule in SPLIT_SCHEDULES:
        return last.held - (last.deferred if splitting == "late" else 0.0)
    if layout.schedule in _HOLD_ALL:
        return float(num_micro)
    return 2.0 if layout.schedule == "interleaved-1f1b" and num_micro % max(1, num_micro // layout.pipeline) else 1.0
