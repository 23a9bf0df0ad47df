"""Failures and saves followed from event to event on a clock. It knows none of the formulas that it judges."""

from __future__ import annotations

import math
import random
from collections import deque

from closeranks.facts.checkpoint_policy.save_interval import CheckpointLevel


class Strikes:
    """When failures of one kind strike. The lives are a shuffled deck of even quantiles, so that their mean is that of
    the distribution and a few thousand of them suffice."""

    def __init__(self, mtbf_s: float, num: int, seed: int) -> None:
        self._lives = [-mtbf_s * math.log(1 - (place + 0.5) / num) for place in range(num)]
        random.Random(seed).shuffle(self._lives)
        self._num = num
        self._drawn = 0
        self.at_s = 0.0
        self.strike(0.0)

    def strike(self, now_s: float) -> None:
        self.at_s = now_s + self._lives[self._drawn % self._num]
        self._drawn += 1


class Play:
    """A job that saves every ``period_s`` of work to the first level, and every ``every``-th time to the second too."""

    def __init__(
        self, period_s: float, levels: list[CheckpointLevel], every: int, num_failures: int, seed: int
    ) -> None:
        self.period_s = period_s
        self.levels = levels
        self.every = every
        rate = sum(level.rate for level in levels)
        counts = [max(1, round(num_failures * level.rate / rate)) for level in levels]
        self.strikes = [
            Strikes(lv.mtbf_s, num, seed + n) for n, (lv, num) in enumerate(zip(levels, counts, strict=True))
        ]
        self.clock_s = self.work_s = 0.0
        self.pending: list[deque[tuple[float, float]]] = [deque() for _ in levels]
        """Per level, saves under way: when each will count, and the work it holds."""
        self.safe_s = [0.0 for _ in levels]
        self.num_saves = 0

    def wasted(self, num_failures: int) -> float:
        failures = 0
        while failures < num_failures:
            level = min(range(len(self.levels)), key=lambda place: self.strikes[place].at_s)
            if not self._trains_until_saved(self.strikes[level].at_s):
                failures += self._falls(level)
        return 1 - self.work_s / self.clock_s

    def _trains_until_saved(self, strike_s: float) -> bool:
        """One period of work and its save, unless a failure comes first."""
        begin_s = self.clock_s + self.period_s
        if len(self.levels) == 1 and self.pending[0]:  # the medium takes one save at a time, and training waits for it
            begin_s = max(begin_s, self.pending[0][-1][0])
        goes_to = [0, 1] if len(self.levels) > 1 and (self.num_saves + 1) % self.every == 0 else [0]
        end_s = begin_s + sum(self.levels[place].stall_s for place in goes_to)
        if end_s >= strike_s:
            return False
        self.clock_s, self.work_s, self.num_saves = end_s, self.work_s + self.period_s, self.num_saves + 1
        for place in goes_to:
            self.pending[place].append((begin_s + self.levels[place].durable_s, self.work_s))
        self._settle(end_s)
        return True

    def _settle(self, now_s: float) -> None:
        for place, pending in enumerate(self.pending):
            while pending and pending[0][0] <= now_s:
                self.safe_s[place] = pending.popleft()[1]

    def _falls(self, level: int) -> int:
        """A failure, and those that strike while the job starts again; it goes on from the best that is left."""
        failures = 0
        while True:
            failures, self.clock_s = failures + 1, self.strikes[level].at_s
            self.strikes[level].strike(self.clock_s)
            self._settle(self.clock_s)
            for pending in self.pending:
                pending.clear()
            self.work_s = max(self.safe_s[level:])
            self.safe_s[: level + 1] = [self.work_s] * (level + 1)  # the nearer places are filled from where it starts
            again_s = self.clock_s + self.levels[level].restart_s
            level = min(range(len(self.levels)), key=lambda place: self.strikes[place].at_s)
            if self.strikes[level].at_s >= again_s:
                self.clock_s, self.num_saves = again_s, 0
                return failures


def play(
    period_s: float, levels: list[CheckpointLevel], every: int = 1, num_failures: int = 2400, seed: int = 7
) -> float:
    """Share of the time that is lost."""
    return Play(period_s, levels, every, num_failures, seed).wasted(num_failures)


def share_store(transfer_s: float, num_jobs: int, period_s: float, num_rounds: int, seed: int = 3) -> float:
    """Mean time until a save is through when jobs save at random phases, sharing the store from event to event.

    Of three periods the second is measured: the first fills the store as it always is.
    """
    chance, total = random.Random(seed), 0.0
    for _ in range(num_rounds):
        phases = sorted(chance.uniform(0, period_s) for _ in range(num_jobs))
        starts = [turn * period_s + phase for turn in range(3) for phase in phases]
        ends = _share(transfer_s, starts)
        total += sum(ends[job] - starts[job] for job in range(num_jobs, 2 * num_jobs)) / num_jobs
    return total / num_rounds


def _share(transfer_s: float, starts: list[float]) -> dict[int, float]:
    left: dict[int, float] = {}
    ends: dict[int, float] = {}
    clock_s, coming = 0.0, 0
    while len(ends) < len(starts):
        until_end = min(left.values()) * len(left) if left else math.inf
        until_start = starts[coming] - clock_s if coming < len(starts) else math.inf
        passed_s = min(until_end, until_start)
        left = {job: rest - passed_s / len(left) for job, rest in left.items()}
        clock_s += passed_s
        if until_start <= until_end:
            left[coming] = transfer_s
            coming += 1
        for job in [job for job, rest in left.items() if rest <= 1e-9]:
            del left[job]
            ends[job] = clock_s
    return ends
