"""Which records does a run folder lack: metrics that are missing, damaged or cut off? In sentences. Pure.

A fault leaves small gaps of its own (a step that was not written any more), so only what goes beyond that is told.
Invariant: an undamaged folder has no sentence, whatever happened to its run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from closeranks.telemetry import formatting

_OF_A_FAULT = 2
"""Steps that a generation may leave unwritten at its end."""


def damaged_lines(what: str, num: int) -> Iterator[str]:
    if num:
        yield f"{formatting.count(num, 'line')} of {what} {'is' if num == 1 else 'are'} damaged and left out"


def lacking_steps(steps: Collection[int], began_after: int | None, num_generations: int) -> Iterator[str]:
    """``steps``: those that rank 0 recorded; ``began_after``: the steps that were finished when the run began, None if
    that record is missing."""
    if began_after is None:
        yield "rank 0's record of how the run began is missing: workers, device and model are not known"
    first = min(steps, default=0) if began_after is None else began_after + 1
    num = max(steps, default=0) - first + 1 if steps else 0
    if (missing := num - len(steps)) > _OF_A_FAULT * num_generations:
        yield f"rank 0's records of {missing:,} of {num:,} steps are missing"


def lacking_phases(steps_by_rank: Mapping[int, Collection[int]], num_generations: int) -> Iterator[str]:
    """``steps_by_rank``: the steps whose phases each rank recorded."""
    everywhere = frozenset[int]().union(*steps_by_rank.values())
    for rank, steps in sorted(steps_by_rank.items()):
        if (missing := len(everywhere) - len(steps)) > _OF_A_FAULT * num_generations:
            yield f"rank {rank} lacks the record of where its time went for {missing:,} of {len(everywhere):,} steps"


def lacking_ranks(num_recorded: int, world_size: int) -> Iterator[str]:
    """``num_recorded``: ranks that left any metrics."""
    if num_recorded < world_size:
        yield f"the metrics of {world_size - num_recorded:,} of {world_size:,} ranks are not in this folder"
