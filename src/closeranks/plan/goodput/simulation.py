"""Simulates a run event by event: failures, detection, recovery, spares, repair, shrinking and growing.

Pure: ``simulate`` is a function of the scenario and of the failures that were drawn, without randomness of its own.
Invariants: time is whole microseconds, and the rows add up to workers times wall time exactly; a host is at work,
standing by, in the pool of cold spares, on its way or under repair, and their number never changes.

[Note: hosts] A host that is lost is replaced at once by one that stands by. If there is none, cold spares are started,
and the run waits or shrinks until one arrives or a host is back from repair. A host that comes back when nothing is
missing stands by; if enough do, it relieves a cold spare.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from closeranks.facts.failures.failure_rates import SILENT, SLOW, FailureTable
from closeranks.plan.goodput.failure_draw import US, DrawnFailure
from closeranks.plan.goodput.scenario import GoodputScenario, RecoveryStrategy
from closeranks.plan.goodput.time_rows import DETECTION, RECOVERY, SAVE, USEFUL, WAITING
from closeranks.plan.goodput.training_progress import TrainingProgress

_TRAINING = "training"
_HOST_BACK, _EVICTION, _SILENT_FOUND = range(3)


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    rows: dict[str, int]
    """Worker-microseconds by row (``time_rows.ROW_WORDS``)."""
    num_workers: int
    wall_us: int
    interruptions: dict[str, int]
    """Failures that stopped the run without notice, by kind."""
    num_planned: int
    """Stops with enough notice to lose no work."""
    num_evicted: int
    """Slow hosts that were evicted."""
    num_rollbacks: int
    """Resumes from a checkpoint."""
    repair_host_s: float
    """Hosts under repair, summed up over time;"""
    cold_host_s: float
    """cold spares in use, likewise."""

    @property
    def goodput(self) -> float:
        return self.rows.get(USEFUL, 0) / (self.num_workers * self.wall_us)

    @property
    def num_interruptions(self) -> int:
        return sum(self.interruptions.values())


def simulate(
    scenario: GoodputScenario, strategy: RecoveryStrategy, table: FailureTable, failures: Sequence[DrawnFailure]
) -> SimulatedRun:
    """``failures``: in order, as ``draw_failures`` draws them. ``table``: what the run believes when it chooses how
    often to save."""
    return _Simulation(scenario, strategy, table).run(failures)


class _Simulation:
    def __init__(self, scenario: GoodputScenario, strategy: RecoveryStrategy, table: FailureTable) -> None:
        self.scenario, self.strategy = scenario, strategy
        self.progress = TrainingProgress(scenario, strategy, table)
        self.num_hosts = scenario.num_hosts
        self.at_work, self.hot, self.cold = self.num_hosts, scenario.spares, scenario.cold_spares
        self.in_repair = self.arriving = 0
        self.phase, self.until_us = _TRAINING, -1
        self.active = self.num_hosts
        self.lost_at_once = 0
        """Hosts lost since training stopped."""
        self.slow: list[DrawnFailure] = []
        self.overdue: list[DrawnFailure] = []
        """Those of them that should be evicted."""
        self.events: list[tuple[int, int, int, object]] = []
        self.num_events = 0
        self.interruptions: Counter[str] = Counter()
        self.num_planned = self.num_evicted = self.num_rollbacks = 0
        self.repair_us = self.cold_us = 0

    def run(self, failures: Sequence[DrawnFailure]) -> SimulatedRun:
        end_us = round(self.scenario.wall_s * US)
        for failure in failures:
            self._advance(min(failure.at_us, end_us))
            if failure.at_us < end_us:
                self._fail(failure)
        self._advance(end_us)
        rows = {USEFUL: self.progress.position, **self.progress.rows}
        return SimulatedRun(
            rows=rows,
            num_workers=self.scenario.num_devices,
            wall_us=end_us,
            interruptions=dict(self.interruptions),
            num_planned=self.num_planned,
            num_evicted=self.num_evicted,
            num_rollbacks=self.num_rollbacks,
            repair_host_s=self.repair_us / US,
            cold_host_s=self.cold_us / US,
        )

    @property
    def now_us(self) -> int:
        return self.progress.now_us

    @property
    def missing(self) -> int:
        return self.num_hosts - self.at_work

    def _advance(self, to_us: int) -> None:
        """Handle every event up to this instant."""
        while True:
            next_us = min(to_us, self.events[0][0] if self.events else to_us)
            if self.phase not in (_TRAINING, WAITING):
                next_us = min(next_us, self.until_us)
            self._spend(next_us - self.now_us)
            if self.phase not in (_TRAINING, WAITING) and self.until_us == next_us:
                self._end_phase()
            elif self.events and self.events[0][0] == next_us:
                _, _, what, subject = heapq.heappop(self.events)
                self._happen(what, subject)
            else:
                return

    def _spend(self, wall_us: int) -> None:
        self.repair_us += self.in_repair * wall_us
        self.cold_us += (self.scenario.cold_spares - self.cold) * wall_us
        if self.phase == _TRAINING:
            slowest = max((failure.kind.slowdown for failure in self.slow), default=1.0)
            self.progress.train(wall_us, self.active * self.scenario.per_host, round(1000 * slowest))
        else:
            self.progress.stop(wall_us, self.phase)

    def _schedule(self, after_us: int, what: int, subject: object) -> None:
        self.num_events += 1
        heapq.heappush(self.events, (self.now_us + after_us, self.num_events, what, subject))

    def _fail(self, failure: DrawnFailure) -> None:
        kind = failure.kind
        if failure.place >= self.at_work / self.num_hosts:
            return  # that host is missing
        if self.phase == WAITING and (not kind.hosts or kind.shows in (SLOW, SILENT)):
            return  # nothing computes
        if kind.shows == SLOW:
            self.slow.append(failure)
            self._schedule(round(self.strategy.slow_s * US), _EVICTION, failure)
        elif kind.shows == SILENT:
            self._schedule(round(self.strategy.silent_s * US), _SILENT_FOUND, (failure, self.progress.durable()))
        elif kind.notice_s and self.phase == _TRAINING and self._fits(kind.notice_s):
            self.num_planned += 1
            self._pause()
            self._lose(kind.hosts, failure.repair_us)
        else:
            self.interruptions[kind.kind] += 1
            self._stop(failure, self._fell_back(failure))

    def _fits(self, notice_s: float) -> bool:
        """Whether the run loses no work if it is told this long before it must stop."""
        return notice_s >= (self.scenario.step_s if self.strategy.from_memory else self.scenario.durable_s)

    def _fell_back(self, failure: DrawnFailure) -> bool:
        """Whether the run must resume from its checkpoint: without snapshots, or if both copies of one are lost."""
        num_lost, others = failure.kind.hosts, self.num_hosts - 1
        pairs = num_lost * (num_lost - 1) / 2 + num_lost * self.lost_at_once
        both_lost = num_lost > 0 and (not others or failure.copies < pairs / others)
        return not self.strategy.from_memory or both_lost

    def _stop(self, failure: DrawnFailure, from_checkpoint: bool, clean: int | None = None) -> None:
        """``clean``: the newest checkpoint before values became wrong, if they did."""
        was_training = self.phase == _TRAINING
        if from_checkpoint:
            self.progress.fall_back_to_checkpoint(clean)
            self.num_rollbacks += 1
        elif was_training:
            self.progress.fall_back_to_snapshot()
        self._lose(failure.kind.hosts, failure.repair_us)
        if self.phase != WAITING:
            self._enter(DETECTION, self.strategy.detection_s(failure.kind, self.scenario.step_s))

    def _pause(self) -> None:
        """Stop at the end of a step, with nothing lost; without snapshots, after a last save."""
        if not self.strategy.from_memory:
            self.progress.save_now()
        self._enter(SAVE, 0.0 if self.strategy.from_memory else self.scenario.durable_s)

    def _enter(self, phase: str, seconds: float) -> None:
        self.phase, self.until_us = phase, self.now_us + round(seconds * US)

    def _end_phase(self) -> None:
        if self.phase == RECOVERY:
            self.phase, self.lost_at_once = _TRAINING, 0
            self.active = self._usable_hosts()
            self._evict_overdue()
        elif self._usable_hosts():
            self._enter(RECOVERY, self.strategy.recover_s)
        else:
            self.phase = WAITING

    def _usable_hosts(self, num_hosts: int | None = None) -> int:
        """Hosts of whole replicas; 0 if the run must wait for more."""
        present = self.at_work if num_hosts is None else num_hosts
        if present >= self.num_hosts:
            return self.num_hosts
        usable = present // self.scenario.replica_hosts * self.scenario.replica_hosts
        return usable if self.strategy.shrinks and usable >= self.scenario.least_share * self.num_hosts else 0

    def _lose(self, num_hosts: int, repair_us: int) -> None:
        num_lost = min(num_hosts, self.at_work)
        self.lost_at_once += num_lost
        self.at_work -= num_lost
        self.in_repair += num_lost
        for _ in range(num_lost):
            self._schedule(repair_us, _HOST_BACK, True)
        replaced = min(self.missing, self.hot)
        self.hot -= replaced
        self.at_work += replaced
        wanted = min(self.cold, self.missing - self.arriving)
        for _ in range(wanted):
            self.cold -= 1
            self.arriving += 1
            self._schedule(round(self.scenario.cold_s * US), _HOST_BACK, False)

    def _happen(self, what: int, subject: object) -> None:
        if what == _HOST_BACK:
            self._host_back(from_repair=bool(subject))
        elif what == _EVICTION and isinstance(subject, DrawnFailure):
            self.overdue.append(subject)
            self._evict_overdue()
        elif isinstance(subject, tuple):
            failure, clean = subject
            self.interruptions[failure.kind.kind] += 1
            self._stop(failure, True, clean)

    def _host_back(self, *, from_repair: bool) -> None:
        """A host arrives, from repair or from the pool of cold spares ([Note: hosts])."""
        if from_repair:
            self.in_repair -= 1
        else:
            self.arriving -= 1
        if self.missing:
            self.at_work += 1
            if self.phase == WAITING and self._usable_hosts():
                self._enter(RECOVERY, self.strategy.recover_s)
            elif self.phase == _TRAINING and self._usable_hosts() > self.active:
                self._pause()
        elif self.hot < self.scenario.spares or self.overdue:
            self.hot += 1
        else:
            self.cold += 1
        self._evict_overdue()

    def _evict_overdue(self) -> None:
        """Replace a slow host, or train on without it if that is faster. A kind that takes no host needs a restart."""
        while self.phase == _TRAINING and self.overdue:
            failure = self.overdue[0]
            num_lost = failure.kind.hosts
            usable = self._usable_hosts(self.at_work - num_lost)
            if self.hot < num_lost and usable * failure.kind.slowdown <= self.active:
                return
            self.overdue.pop(0)
            self.slow.remove(failure)
            self.num_evicted += 1
            self._pause()
            self._lose(num_lost, failure.repair_us)
