"""How many micro-batches does a pipeline rank hold at its peak? In closed form, for searches over many layouts.

Invariant: the numbers are those of the schedules that train (``facts.pipeline.occupancy``, which simulates them).
"""

from __future__ import annotations

from closeranks.facts.layout import Layout

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
    if stages_per_rank == 1:
        return float(min(num_micro, size - rank))
    stages = 2 * (size - rank - 1) + (stages_per_rank - 1) * size + 1
    return min(num_micro, stages / stages_per_rank)


def head_in_flight(layout: Layout, num_micro: int) -> int:
    """Micro-batches of which the last stage holds logits: their backward follows at once."""
    if layout.pipeline > 1 and layout.schedule in _HOLD_ALL:
        return num_micro
    return min(num_micro, 2) if layout.schedule == "dualpipev" and layout.pipeline > 1 else 1
