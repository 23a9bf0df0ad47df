"""Detects stragglers: ranks that compute slower than the others.

Values in, findings out. Each rank reports its compute time per micro-batch, without waiting; it is compared with the
median of the other ranks that have the same work. A pipeline stage with a single rank has no such others: its time is
compared with its own first steps, and that change with the change of the other ranks. There a rank that was slow from
the start cannot be distinguished from one that has more to do. A rank that computes nothing, a parameter server, is
compared with nobody.

Invariants: a rank is reported when it is slow in every part of ``num_steps`` consecutive steps, and not again until it
was well for as many; what lasts less than ``SPAN_S`` is attributed to the scheduler and not reported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from closeranks.agent.detection.progress import WorkerProgress

SPAN_S = 2.0
"""Three busy processes on two processors differ by a factor of 1.5 for a second, until the scheduler moves one."""
_SAMPLE_S = 0.5
_SAMPLES = 4
"""Single steps vary: the steps are judged in so many parts, each by its mean, and none shorter than ``_SAMPLE_S``."""


@dataclass(frozen=True, slots=True)
class Straggler:
    """One straggler."""

    rank: int
    step: int
    score: float
    compute_s: float
    """Its compute time per micro-batch."""
    median_s: float
    """The compute time expected from the other ranks."""


@dataclass(frozen=True, slots=True)
class ComputeTime:
    """A rank's compute time per micro-batch since the last check."""

    compute_s: float
    pipeline_rank: int = 0
    usual_s: float = 0.0
    """The same in its first steps; 0: not known yet."""


def expected_times(times: Mapping[int, ComputeTime]) -> dict[int, float]:
    """For each rank that can be compared, the compute time expected from the others."""
    found = {}
    for rank, own in times.items():
        others = [(other, one) for other, one in times.items() if other != rank]
        alike = [one.compute_s for _, one in others if one.pipeline_rank == own.pipeline_rank]
        changes = [one.compute_s / one.usual_s for _, one in others if one.usual_s > 0]
        if alike:
            found[rank] = median(alike)
        elif own.usual_s > 0 and changes:
            found[rank] = own.usual_s * median(changes)
    return {rank: seconds for rank, seconds in found.items() if seconds > 0}


@dataclass(slots=True)
class _Record:
    """One rank, between two checks."""

    num_timed: int
    compute_sum_s: float
    usual_steps: int = 0
    usual_sum_s: float = 0.0
    num_slow: int = 0
    num_well: int = 0
    slow_since: float = 0.0
    is_reported: bool = False

    def update(self, is_slow: bool, num_steps: int, now: float) -> None:
        """Count consecutive steps that were slow, or that were not."""
        if is_slow and self.num_slow == 0:
            self.slow_since = now
        self.num_slow = self.num_slow + num_steps if is_slow else 0
        self.num_well = 0 if is_slow else self.num_well + num_steps


@dataclass(slots=True)
class StragglerDetector:
    """Keeps what must be remembered between checks, in one generation."""

    ratio: float
    num_steps: int
    scores: dict[int, float] = field(default_factory=dict)
    """By rank, for the last part that was judged: compute time relative to the expected one."""
    _records: dict[int, _Record] = field(default_factory=dict)
    _sampled_at: float = 0.0

    def begin(self) -> None:
        """A new generation."""
        self.scores, self._records, self._sampled_at = {}, {}, 0.0

    def check(self, progress_of: Mapping[int, WorkerProgress], now: float) -> list[Straggler]:
        """The stragglers to report now. May be called at any rate, with the progress of all ranks."""
        if self._records.keys() != progress_of.keys():
            self._records = {
                rank: _Record(progress.num_timed, progress.compute_sum_s) for rank, progress in progress_of.items()
            }
            return []
        share = max(1, self.num_steps // _SAMPLES)
        timed = {rank: progress for rank, progress in progress_of.items() if progress.num_timed}  # no parameter server
        is_due = all(progress.num_timed - self._records[rank].num_timed >= share for rank, progress in timed.items())
        if not timed or not is_due or now - self._sampled_at < _SAMPLE_S:
            return []
        self._sampled_at = now
        times = {rank: self._sample(self._records[rank], progress) for rank, progress in timed.items()}
        return self._findings(timed, times, now)

    def _sample(self, record: _Record, progress: WorkerProgress) -> ComputeTime:
        spent_s, steps = progress.compute_sum_s - record.compute_sum_s, progress.num_timed - record.num_timed
        usual_s = record.usual_sum_s / record.usual_steps if record.usual_steps >= self.num_steps else 0.0
        if not usual_s and record.num_timed:  # the very first steps are warm-up
            record.usual_sum_s += spent_s
            record.usual_steps += steps
        return ComputeTime(spent_s / steps, progress.pipeline_rank, usual_s)

    def _findings(
        self, progress_of: Mapping[int, WorkerProgress], times: Mapping[int, ComputeTime], now: float
    ) -> list[Straggler]:
        found, expected_s = [], expected_times(times)
        self.scores = {rank: times[rank].compute_s / seconds for rank, seconds in expected_s.items()}
        for rank, progress in progress_of.items():
            record = self._records[rank]
            record.update(self.scores.get(rank, 1.0) > self.ratio, progress.num_timed - record.num_timed, now)
            record.num_timed, record.compute_sum_s = progress.num_timed, progress.compute_sum_s
            if record.is_reported:
                record.is_reported = record.num_well < self.num_steps
            elif record.num_slow >= self.num_steps and now - record.slow_since >= SPAN_S:
                record.is_reported = True
                found.append(
                    Straggler(rank, progress.step or 0, self.scores[rank], times[rank].compute_s, expected_s[rank])
                )
        return found
