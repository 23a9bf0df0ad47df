"""Finds the legal layout nearest to an illegal one, for the same number of ranks.

An error that only refuses leaves the arithmetic to the user; this does it. Invariant: the result is legal, has exactly
the requested number of ranks, and is a pure function of layout, constraints and that number; a legal layout of that
many ranks is its own nearest.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import log2

from closeranks.facts.layout import SCHEDULES, Layout, LayoutConstraints, divisors, legal_problems, pluralize

_PLAIN = "1f1b"


def nearest_legal(layout: Layout, constraints: LayoutConstraints, num_ranks: int) -> Layout | None:
    """The legal layout of ``num_ranks`` ranks that changes least; None where no layout of that many is legal."""
    return next(iter(nearest_first(layout, constraints, num_ranks)), None)


def nearest_first(layout: Layout, constraints: LayoutConstraints, num_ranks: int) -> list[Layout]:
    """All legal layouts of ``num_ranks`` ranks with this ZeRO stage, those that change least first.

    Tensor and pipeline weigh most, by how often their size is doubled or halved; then the schedule, the ZeRO stage and
    its shards; then the data axis. Context and expert are 1: this version supports the other axes only.
    """
    found = [near for near in _candidates(layout, num_ranks) if not legal_problems(near, constraints)]
    return sorted(found, key=lambda near: _distance(near, layout))


def nearest_layout_hint(layout: Layout, constraints: LayoutConstraints, num_ranks: int) -> str:
    """The hint at the end of an error; empty where there are no ranks."""
    if num_ranks < 1:
        return ""
    near = nearest_legal(layout, constraints, num_ranks)
    if near is None:
        return f"No layout of {pluralize(num_ranks, 'rank')} is legal for this model and batch."
    # A layout's text omits defaults: a default schedule that replaced another one must be named all the same.
    is_changed = near.schedule != layout.schedule and near.schedule == _PLAIN
    return f"The nearest legal layout is {near}{f' schedule={_PLAIN}' if is_changed else ''}."


def _candidates(layout: Layout, num_ranks: int) -> Iterator[Layout]:
    """Every factorization of ``num_ranks`` into axes, with ZeRO and schedule unchanged wherever that is possible."""
    zero = min(max(layout.zero, 0), 3)
    schedules = [_PLAIN] if layout.schedule not in SCHEDULES else dict.fromkeys((layout.schedule, _PLAIN))
    for tensor in divisors(num_ranks):
        for pipeline in divisors(num_ranks // tensor):
            data = num_ranks // tensor // pipeline
            shards = {0} if layout.shard <= 0 else {0, *divisors(data)}
            for schedule in schedules:
                for shard in shards:
                    yield Layout(data, zero, shard, tensor, pipeline, schedule=schedule)


def _distance(near: Layout, layout: Layout) -> tuple[float, ...]:
    tensor, pipeline = _ratio(near.tensor, layout.tensor), _ratio(near.pipeline, layout.pipeline)
    return (
        tensor + pipeline,
        near.schedule != layout.schedule,
        near.zero != layout.zero,
        near.shard != layout.shard,
        _ratio(_shards(near), _shards(layout)),
        _ratio(near.data, layout.data),
        # A tie so far is broken by these: the least split wins.
        near.pipeline,
        near.tensor,
        near.shard,
    )


def _ratio(size: int, wanted: int) -> float:
    """Doublings or halvings between two sizes."""
    return abs(log2(size / max(wanted, 1)))


def _shards(layout: Layout) -> int:
    return (layout.shard or layout.data) if layout.zero else 1
