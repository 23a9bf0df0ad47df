"""How many micro-batches does a pipeline rank hold at its peak? In closed form, for searches over many layouts.

Invariant: the numbers are those of the schedules that train (``facts.pipeline.occupancy``, which simulates them).
"""

from __future__ import annotations

from closeranks.facts.layout import Layout
from closeranks.facts.pipeline.stages import V_SHAPED

_HOLD_ALL = frozenset({"gpipe", "looped-bfs"})


def in_flight(layout: Layout, rank: int, num_micro: int, stages_per_rank: int) -> float:
    """In micro-batches of the rank's whole share of the model: a stage of two counts half."""
    size = layout.pipeline
    if size == 1:
        return 1.0
    if layout.schedule in _HOLD_ALL:
        return float(num_micro)
    if layout.schedule in ("zbv", "interleaved-zero-bubble"):
        return float(min(num_micro, size))
    if layout.schedule == "dualpipev":
        return min(num_micro, size + 0.5)
    return sum(stages_in_flight(layout, rank, num_micro, stages_per_rank)) / stages_per_rank


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


def head_in_flight(layout: Layout, num_micro: int) -> int:
    """Micro-batches of which the last stage holds logits: mostly their backward follows at once. In a V it waits for
    the forwards of the ranks behind, where micro-batches are few."""
    size = layout.pipeline
    if size == 1:
        return 1
    if layout.schedule in _HOLD_ALL:
        return num_micro
    if layout.schedule == "interleaved-zero-bubble":
        return min(num_micro, size)
    if layout.schedule in V_SHAPED:
        return min(num_micro, max(2 * size - num_micro, 2 if layout.schedule == "dualpipev" else 1))
    return 2 if layout.schedule == "interleaved-1f1b" and num_micro % max(1, num_micro // size) else 1
