"""Computes which part of a mixture is drawn at a position, and how often it was drawn before.

Invariant: after any number of positions each part has had its weight times that number of turns, rounded down or up; so
a part's draws are within one of its share at every prefix, for any number of parts and any weights. A turn is a pure
function of weights and position, at the same cost anywhere.

[Note: turns] To stay within one, a part's n-th turn must lie between the positions where its share passes n - 1 and n:
it has a release and a deadline, and taking the released turn with the earliest deadline meets all of them (Tijdeman's
chairman assignment). That is a walk from position 0. To begin anywhere, the walk needs the counts at one position such
that (F) all later turns can meet their deadlines, and (B) all earlier turns could have been released in time.

(F) holds at any position for shares rounded down, with the remaining turns given to the parts whose next deadline is
earliest. Up to the deadline of a part that got none, the turns of all parts count, at most as many as there are
positions; up to an earlier one, only those of parts that are one ahead count, less than their shares.

(B) holds after a walk of H = 1 / (smallest share) positions from (F): for turns released on the way, since the walk
respected their releases; for those before, since every part has had a turn that was due by then.

So the counts at a position are those of a walk that began H before it, or at 0. Between two such positions a schedule
that meets all constraints exists (each interval has room for the turns that fit only there), and the earliest deadline
finds it, a chunk at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from heapq import heappop, heappush
from math import lcm

import numpy as np

from closeranks.core.errors import DataError
from closeranks.data.sampling.order import SampleOrder
from closeranks.data.sampling.permutation import Ints

_LARGEST_TOTAL = 1 << 40
"""Weights become integers with at most this sum, so that a chunk of them fits 64 bits."""
_SMALLEST_SHARE = 1e-6
"""A chunk is as long as the cycle of the rarest part; at this share, it takes about a second to compute."""
_STRETCH = 4096


@dataclass(frozen=True, slots=True)
class WeightedInterleave:
    """Assigns positions to parts in proportion to ``weights``, which are integers."""

    weights: tuple[int, ...]

    @property
    def total(self) -> int:
        return sum(self.weights)

    @property
    def cycle_length(self) -> int:
        """Number of consecutive positions in which every part has at least one turn, whatever came before."""
        return -(-self.total // min(self.weights))

    @property
    def chunk_size(self) -> int:
        """Positions that are computed together; never less than the cycle, so that starting anywhere costs no more than
        a chunk."""
        return max(_STRETCH, self.cycle_length)

    @classmethod
    def of(cls, weights: Sequence[float]) -> WeightedInterleave:
        """Exactly in the proportion of the decimals as they are written, unless their common denominator exceeds 2**40:
        then shares are off by about 1e-12, one draw in 1e12."""
        if not weights or not all(weight > 0.0 for weight in weights):
            raise ValueError(f"a mixture has parts with weights above 0, not {weights}")
        exact = [Fraction(str(weight)) for weight in weights]
        common = lcm(*(weight.denominator for weight in exact))
        whole = _reduced([int(weight * common) for weight in exact])
        if min(whole) < _SMALLEST_SHARE * sum(whole):
            number = whole.index(min(whole))
            what = f"weight {weights[number]:g} is less than a millionth of a mixture of {sum(weights):g}"
            raise DataError(what, "Give that part more weight, or leave it out.")
        return cls(tuple(whole))

    def at(self, positions: Ints) -> tuple[Ints, Ints]:
        """The part drawn at each position, and how many turns that part had before."""
        places = np.asarray(positions, dtype=np.int64)
        parts, draws = np.empty_like(places), np.empty_like(places)
        stretches = places // self.chunk_size
        for number in np.unique(stretches):
            here = stretches == number
            table = _table(self, int(number))
            offsets = places[here] - number * self.chunk_size
            parts[here], draws[here] = table.parts[offsets], table.draws[offsets]
        return parts, draws


@dataclass(frozen=True, slots=True)
class MixtureOrder(SampleOrder):
    """Several orders in fixed proportions. Samples are numbered consecutively, part after part; each part goes through
    its own epochs at its own pace. An epoch of the mixture has as many positions as all parts have samples."""

    parts: tuple[SampleOrder, ...]
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.parts) != len(self.weights):
            raise ValueError(f"{len(self.parts)} parts of a mixture with {len(self.weights)} weights")
        _interleave(self.weights)

    @property
    def num_samples(self) -> int:  # type: ignore[override]
        return sum(part.num_samples for part in self.parts)

    @property
    def effective_weights(self) -> tuple[float, ...]:
        """The shares after rounding."""
        interleave = _interleave(self.weights)
        return tuple(weight / interleave.total for weight in interleave.weights)

    def at(self, positions: Ints) -> Ints:
        numbers, draws = _interleave(self.weights).at(positions)
        samples = np.empty_like(draws)
        offset = 0
        for number, part in enumerate(self.parts):
            here = numbers == number
            if here.any():
                samples[here] = offset + part.at(draws[here])
            offset += part.num_samples
        return samples


@lru_cache(maxsize=64)
def _interleave(weights: tuple[float, ...]) -> WeightedInterleave:
    return WeightedInterleave.of(weights)


def _reduced(whole: list[int]) -> list[int]:
    """The same proportions in the smallest integers, or the nearest ones whose sum is within the limit."""
    divisor = int(np.gcd.reduce(np.array(whole, dtype=object)))
    whole = [weight // divisor for weight in whole]
    total = sum(whole)
    if total <= _LARGEST_TOTAL:
        return whole
    return _reduced([max(1, weight * (_LARGEST_TOTAL - len(whole)) // total) for weight in whole])


@dataclass(frozen=True, slots=True, eq=False)
class _Table:
    """The turns of one chunk."""

    parts: Ints
    draws: Ints


@lru_cache(maxsize=4)
def _table(interleave: WeightedInterleave, number: int) -> _Table:
    first = number * interleave.chunk_size
    begun, done = _counts(interleave, first), _counts(interleave, first + interleave.chunk_size)
    parts = _walk(interleave, first, interleave.chunk_size, begun, done)
    draws = np.empty_like(parts)
    for part, count in enumerate(begun):
        own = np.flatnonzero(parts == part)
        draws[own] = count + np.arange(len(own))
    return _Table(parts, draws)


@lru_cache(maxsize=16)
def _counts(interleave: WeightedInterleave, position: int) -> tuple[int, ...]:
    """Turns of each part before ``position``, such that all turns before and after can meet their constraints."""
    first = max(0, position - interleave.cycle_length)
    begun = _apportioned(interleave, first)
    taken = np.bincount(_walk(interleave, first, position - first, begun), minlength=len(begun))
    return tuple(count + int(more) for count, more in zip(begun, taken, strict=True))


def _apportioned(interleave: WeightedInterleave, position: int) -> tuple[int, ...]:
    """(F): shares rounded down, and one more for the parts whose next deadline is earliest."""
    total = interleave.total
    counts = [weight * position // total for weight in interleave.weights]
    started = [part for part, weight in enumerate(interleave.weights) if weight * position % total]
    deadlines = {part: -(-(counts[part] + 1) * total // interleave.weights[part]) for part in started}
    for part in sorted(started, key=lambda part: (deadlines[part], part))[: position - sum(counts)]:
        counts[part] += 1
    return tuple(counts)


def _walk(
    interleave: WeightedInterleave, first: int, length: int, begun: Sequence[int], done: Sequence[int] | None = None
) -> Ints:
    """The parts drawn from ``first`` on: the released turn with the earliest deadline. About 0.4 us per position.

    ``done``: the counts to arrive at.
    """
    num_parts = len(interleave.weights)
    jobs = [_jobs(interleave, part, first, length, begun, done) for part in range(num_parts)]
    releases = np.concatenate([release for release, _ in jobs])
    ranks = np.concatenate([deadline * num_parts + part for part, (_, deadline) in enumerate(jobs)])
    ascending = np.argsort(releases, kind="stable")
    waiting = list(zip(releases[ascending].tolist(), ranks[ascending].tolist(), strict=True))
    waiting.append((length, 0))
    released: list[int] = []
    taken: list[int] = []
    following = 0
    for place in range(length):
        while waiting[following][0] <= place:
            heappush(released, waiting[following][1])
            following += 1
        taken.append(heappop(released))
    return np.array(taken, dtype=np.int64) % num_parts


def _jobs(
    interleave: WeightedInterleave, part: int, first: int, length: int, begun: Sequence[int], done: Sequence[int] | None
) -> tuple[Ints, Ints]:
    """Release and deadline, relative to ``first``, of the turns that a part may have in a walk."""
    total, weight = interleave.total, interleave.weights[part]
    passed, rest = divmod(weight * first, total)
    most = -(-weight * (first + length) // total) if done is None else done[part]
    numbers = np.arange(begun[part] - passed, most - passed, dtype=np.int64)
    # Turn n (from 0) may be taken once the share exceeds n, and must be taken before it reaches n + 1.
    releases = np.maximum((numbers * total - rest) // weight, 0)
    deadlines = -((rest - (numbers + 1) * total) // weight)
    return releases, deadlines
