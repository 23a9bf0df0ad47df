"""How long do the ranks of a pipeline wait for one another in a step? In closed form, for each kind of schedule.

Found from the timelines of the schedules that train, and compared with them for every number of micro-batches, also
for fewer than ranks. Invariant: with one micro-batch the stages work one after another, whatever the schedule.
"""

from __future__ import annotations

from dataclasses import dataclass

from closeranks.facts.pipeline.stages import V_SHAPED

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


def bubble_seconds(work: PipelineWork, schedule: str, num_micro: int, *, splits: bool = True) -> float:
    """``gpipe`` and ``1f1b``: the others' work on one micro-batch. Interleaved schedules with ``v`` stages per rank:
    1/v of it with at least as many micro-batches as ranks, and less is saved with fewer. Zero bubble: one stage's
    forward for each other rank, since gradients of weights fill the waits; with fewer micro-batches than ranks they
    do not suffice. Where backwards are not split (``splits`` False), nothing fills them: ``zbv`` then waits for two
    stages' backward of each other rank, and ``interleaved-zero-bubble`` as long as interleaved 1F1B."""
    others = work.num_ranks - 1
    if others < 1:
        return 0.0
    forward = work.forward / others / work.per_rank
    if schedule in V_SHAPED and not splits:
        missing, is_full = max(work.num_ranks - num_micro, 0), num_micro >= 2 * work.num_ranks
        return work.backward + (2 * missing - (schedule == "dualpipev" and is_full)) * forward
    if schedule in _ZERO_BUBBLE and splits:
        half_backward = work.backward / 2 / others / work.per_rank
        missing, missing_more = max(work.num_ranks - num_micro, 0), max(work.num_ranks - 2 * num_micro, 0)
        return others * forward + missing * (forward + half_backward) + missing_more * half_backward
    interleaved = (min(num_micro, work.num_ranks) - 1) / others
    return (work.forward + work.backward) * (1 - (1 - 1 / work.per_rank) * interleaved)
