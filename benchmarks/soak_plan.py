"""When is a soak calm, when does it storm, and what strikes at which second? Pure: the same seed gives the same plan.

calm, storm, calm, storm, calm: what the machine does undisturbed is measured before, between and after. Invariants:
kinds take turns, so that each comes as often as any other (give or take one); every fault has an equal share of the
storms and strikes at a random second of it, whatever the workers do then; none strikes in the last seconds of a storm,
for what it costs would be counted as calm.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

LIGHT = ("kill", "exception", "term")
PER_MINUTE = 62 / 30
"""As often as the run that this one is measured by was struck."""
_CALM_SHARE, _CALM_S = 0.05, 15.0
_TAIL_SHARE, _TAIL_S = 0.2, 20.0


@dataclass(frozen=True, slots=True)
class Window:
    """A stretch of the soak, in seconds since its first calm began."""

    begins_s: float
    ends_s: float
    is_storm: bool

    @property
    def seconds(self) -> float:
        return self.ends_s - self.begins_s


@dataclass(frozen=True, slots=True)
class Planned:
    """One fault."""

    at_s: float
    kind: str
    rank: int
    other: int
    """Whom ``kill2`` takes along."""


@dataclass(frozen=True, slots=True)
class Plan:
    windows: tuple[Window, ...]
    faults: tuple[Planned, ...]

    @property
    def ends_s(self) -> float:
        return self.windows[-1].ends_s

    @property
    def storms(self) -> tuple[Window, ...]:
        return tuple(window for window in self.windows if window.is_storm)


def draw_plan(kinds: Sequence[str], minutes: float, count: int, seed: int, num_ranks: int) -> Plan:
    """``minutes`` of storm with ``count`` faults; 0: as many as ``PER_MINUTE`` says."""
    count = count or math.ceil(minutes * PER_MINUTE)
    rng = random.Random(f"{seed}/{minutes}/{count}/{','.join(kinds)}")
    windows = _windows(60 * minutes)
    times = _times(windows, count, rng)
    turns = _turns(kinds, count, rng)
    return Plan(windows, tuple(_planned(at_s, kind, num_ranks, rng) for at_s, kind in zip(times, turns, strict=True)))


def _windows(storm_s: float) -> tuple[Window, ...]:
    calm_s = max(_CALM_S, _CALM_SHARE * storm_s)
    lengths = (calm_s, storm_s / 2, calm_s, storm_s / 2, calm_s)
    ends = accumulate(lengths)
    pairs = zip(ends, lengths, strict=True)
    return tuple(Window(end - length, end, place % 2 == 1) for place, (end, length) in enumerate(pairs))


def _times(windows: Sequence[Window], count: int, rng: random.Random) -> list[float]:
    storms = [window for window in windows if window.is_storm]
    tail_s = min(_TAIL_S, _TAIL_SHARE * storms[0].seconds)
    numbers = (count - count // 2, count // 2)
    found: list[float] = []
    for storm, number in zip(storms, numbers, strict=True):
        share_s = (storm.seconds - tail_s) / max(1, number)
        found += [storm.begins_s + (place + rng.random()) * share_s for place in range(number)]
    return found


def _turns(kinds: Sequence[str], count: int, rng: random.Random) -> list[str]:
    turns: list[str] = []
    while len(turns) < count:
        turns += rng.sample(list(kinds), len(kinds))
    return turns[:count]


def _planned(at_s: float, kind: str, num_ranks: int, rng: random.Random) -> Planned:
    rank = rng.randrange(num_ranks)
    return Planned(round(at_s, 3), kind, rank, (rank + rng.randrange(1, num_ranks)) % num_ranks)
