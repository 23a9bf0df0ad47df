"""Divides the units of a model into pipeline stages, and places the stages on ranks.

Invariant: stages are contiguous, none is empty, and no other division has a cheaper most expensive stage; every stage
is on exactly one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import inf, isfinite

from closeranks.core.errors import ModelError, UserError
from closeranks.core.registry import did_you_mean
from closeranks.facts.layout import SCHEDULES

V_SHAPED = frozenset({"zbv", "dualpipev"})
"""Schedules whose second half of the stages is placed in reverse order, so that the first rank holds both ends of the
model."""


def stage_placement(schedule: str, num_ranks: int) -> tuple[tuple[int, ...], ...]:
    """The stages of each rank: down and back up the ranks for a V, else round-robin (stage s on rank s % P)."""
    if schedule not in SCHEDULES:
        raise UserError(f"there is no schedule '{schedule}'", did_you_mean(schedule, SCHEDULES))
    if num_ranks < 1:
        raise UserError(f"a pipeline of {num_ranks} ranks has no stages", "Give it at least 1.")
    if schedule in V_SHAPED:
        return tuple((rank, 2 * num_ranks - 1 - rank) for rank in range(num_ranks))
    rows = range(SCHEDULES[schedule])
    return tuple(tuple(row * num_ranks + rank for row in rows) for rank in range(num_ranks))


def balance_stages(costs: Sequence[float], num_stages: int) -> tuple[tuple[int, int], ...]:
    """Divide consecutive units into stages: for each its first unit, and the one after its last.

    Minimizes the cost of the most expensive stage. Ties are broken by the smallest sum of squared costs, then of
    squared counts, then by lighter first stages, since those hold the most micro-batches at once.
    """
    if len(costs) < num_stages or num_stages < 1:
        what = f"{len(costs)} units do not make {num_stages} stages"
        raise ModelError(what, f"Use at least 1 and at most {len(costs)} stages.")
    odd = next((number for number, cost in enumerate(costs) if not (isfinite(cost) and cost >= 0)), None)
    if odd is not None:
        raise ModelError(f"unit {odd} costs {costs[odd]}", "A cost is a finite number, zero or more.")
    sums = (0.0, *accumulate(float(cost) for cost in costs))
    cuts = _even_cuts(sums, num_stages, _smallest_largest(sums, num_stages))
    return tuple(pairwise(cuts))


def _smallest_largest(sums: Sequence[float], num_stages: int) -> float:
    """The smallest possible cost of the most expensive stage.

    As the last cut moves on, the largest of the earlier stages grows and the last stage shrinks, so the best cut is
    where they are equal, and it only moves forward as units are added: each stage costs one pass over the units.
    """
    largest = list(sums)
    for _ in range(num_stages - 1):
        cut, before = 0, largest
        largest = []
        for total in sums:
            best = max(before[cut], total - sums[cut])
            while cut + 1 < len(sums) and (ahead := max(before[cut + 1], total - sums[cut + 1])) <= best:
                cut, best = cut + 1, ahead
            largest.append(best)
    return largest[-1]


@dataclass(frozen=True, slots=True)
class _Range:
    """The possible ends of a stage, both bounds included."""

    first: int
    last: int


Score = tuple[float, int]
"""Sum of squared costs, sum of squared counts."""


@dataclass(frozen=True, slots=True)
class _Row:
    """For each possible end of a stage: the best score of all stages up to there, and where the last one starts."""

    scores: dict[int, Score]
    starts: dict[int, int]


def _even_cuts(sums: Sequence[float], num_stages: int, limit: float) -> list[int]:
    ranges = _ranges(sums, num_stages, limit)
    rows = [_Row({0: (0.0, 0)}, {})]
    for starts, ends in pairwise(ranges):
        rows.append(_Row({}, {}))
        _fill_row(rows[-1], rows[-2], sums, limit, ends, starts)
    cuts = [ranges[-1].last]
    for row in reversed(rows[1:]):
        cuts.append(row.starts[cuts[-1]])
    return cuts[::-1]


def _ranges(sums: Sequence[float], num_stages: int, limit: float) -> list[_Range]:
    """Where each stage may end so that neither the stages up to it nor the later ones are empty or above the limit."""
    num_units = len(sums) - 1
    latest = [0]
    for stage in range(1, num_stages + 1):
        most = num_units - (num_stages - stage)
        latest.append(max(end for end in range(latest[-1], most + 1) if sums[end] - sums[latest[-1]] <= limit))
    earliest = [num_units]
    for stage in range(num_stages - 1, -1, -1):
        total = sums[earliest[-1]]
        earliest.append(min(start for start in range(stage, earliest[-1]) if total - sums[start] <= limit))
    return [_Range(first, last) for first, last in zip(reversed(earliest), latest, strict=True)]


def _fill_row(row: _Row, before: _Row, sums: Sequence[float], limit: float, ends: _Range, starts: _Range) -> None:
    """The best start for each end, by divide and conquer: it increases with the end, so each half need not consider the
    starts of the other half."""
    if ends.first > ends.last:
        return
    end = (ends.first + ends.last) // 2
    best: tuple[Score, int] = ((inf, 0), starts.first)
    for start in range(starts.first, min(starts.last, end - 1) + 1):
        total = sums[end] - sums[start]
        if total <= limit:
            squares, counts = before.scores[start]
            best = min(best, ((squares + total * total, counts + (end - start) ** 2), start))
    row.scores[end], row.starts[end] = best
    _fill_row(row, before, sums, limit, _Range(ends.first, end - 1), _Range(starts.first, best[1]))
    _fill_row(row, before, sums, limit, _Range(end + 1, ends.last), _Range(best[1], starts.last))
