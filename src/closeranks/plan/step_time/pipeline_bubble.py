"""How long do the ranks of a pipeline wait for one another in a step? In closed form, for each kind of schedule.

Found from the timelines of the schedules that train, and compared with them for every number of micro-batches, also
for fewer than ranks. Invariant: with one micro-batch the stages work one after another, whatever the schedule.
"""

from __future__ import annotations

from dataclasses import dataclass

_ZERO_BUBBLE = frozenset({"interleaved-zero-bubble", "zbv", "dualpipev"})


@dataclass(frozen=True, slots=True)
class PipelineWork:
    """The ranks of a pipeline other than the fullest, together, on one micro-batch."""

    forward: float
    backward: float
    num_ranks: int
    """Of the pipeline."""
    per_rank: int
    """Stages."""


def bubble_seconds(work: PipelineWork, schedule: str, num_micro: int) -> float:
    """``gpipe`` and ``1f1b``: the others' work on one micro-batch. Interleaved schedules with ``v`` stages per rank:
    1/v of it with at least as many micro-batches as ranks, and less is saved with fewer. Zero bubble: one stage's
    forward for each other rank, since gradients of weights fill the waits; with fewer micro-batches than ranks they
    do not suffice."""
    others = work.num_ranks - 1
    if others < 1:
        return 0.0
    if schedule in _ZERO_BUBBLE:
        forward = work.forward / others / work.per_rank
        half_backward = work.backward / 2 / others / work.per_rank
        missing, missing_more = max(work.num_ranks - num_micro, 0), max(work.num_ranks - 2 * num_micro, 0)
        return others * forward + missing * (forward + half_backward) + missing_more * half_backward
    interleaved = (min(num_micro, work.num_ranks) - 1) / others
    return (work.forward + work.backward) * (1 - (1 - 1 / work.per_rank) * interleaved)
