"""How far has a run come? Steps, snapshots and saves between two events, in whole microseconds.

Progress is useful worker-time: a step is ``num_workers x step`` of it, however many workers took it. Invariants: what
workers spend is always the sum of the rows, exactly; ``position`` is what counts so far, and falls only by what is
booked as redone. Between events, whole cycles of work and save are skipped at once.
"""

from __future__ import annotations

from collections import Counter

from closeranks.facts.failures.failure_rates import FailureTable
from closeranks.plan.goodput.failure_draw import US
from closeranks.plan.goodput.scenario import GoodputScenario, RecoveryStrategy, save_period_s
from closeranks.plan.goodput.time_rows import MISSING, REDONE, SAVE, SNAPSHOT, STRAGGLER

_PER_MILLE = 1000


class TrainingProgress:
    def __init__(self, scenario: GoodputScenario, strategy: RecoveryStrategy, table: FailureTable) -> None:
        self.rows: Counter[str] = Counter()
        self.position = 0
        self.now_us = 0
        self._num_workers = scenario.num_devices
        step_us = max(1, round(scenario.step_s * US))
        self.step_us = step_us
        self._kept_work = step_us * strategy.snapshot_every * scenario.num_devices
        self._snapshot_us = round(strategy.snapshot_share * step_us)
        self._save_work = (
            round(save_period_s(scenario, strategy, table) / scenario.step_s) * step_us * self._num_workers
        )
        self._stall_us, self.durable_us = round(scenario.stall_s * US), round(scenario.durable_s * US)
        self._stall_left_us = 0
        self._next_save = self._save_work
        self._saves: list[tuple[int, int]] = []
        self._durable = self._restored = 0

    def durable(self) -> int:
        """The position of the newest durable checkpoint."""
        while self._saves and self._saves[0][0] + self.durable_us <= self.now_us:
            self._durable = self._saves.pop(0)[1]
        return self._durable

    def stop(self, wall_us: int, row: str) -> None:
        """All workers stand still for ``wall_us``."""
        self.rows[row] += self._num_workers * wall_us
        self.now_us += wall_us

    def save_now(self) -> None:
        """A last save before a planned stop: durable when the stop is over."""
        self._saves.clear()
        self._durable = self.position
        self._begin_cycle()

    def fall_back_to_snapshot(self) -> None:
        """To the end of the last step of which there is a snapshot."""
        self.durable()
        self._saves.clear()  # a save that was not durable yet is lost
        kept = self.position // self._kept_work * self._kept_work
        self._resume_at(max(self._restored, self._durable, kept))
        self._stall_left_us = 0

    def fall_back_to_checkpoint(self, newest: int | None = None) -> None:
        """To the newest durable checkpoint, or to the one at ``newest`` if that is older."""
        durable = self.durable()
        self._saves.clear()
        self._durable = durable if newest is None else min(newest, durable)
        self._resume_at(self._durable)
        self._begin_cycle()

    def _resume_at(self, position: int) -> None:
        self.rows[REDONE] += self.position - position
        self.position = self._restored = position

    def _begin_cycle(self) -> None:
        self._stall_left_us = 0
        self._next_save = self.position + self._save_work

    def train(self, wall_us: int, active: int, slow_per_mille: int = _PER_MILLE) -> None:
        """``active`` workers train for ``wall_us``, at the pace of the slowest; the others are missing."""
        self.rows[MISSING] += (self._num_workers - active) * wall_us
        gain = active * self.step_us * _PER_MILLE
        cost = (self.step_us + self._snapshot_us) * slow_per_mille
        end_us = self.now_us + wall_us
        while self.now_us < end_us:
            left_us = end_us - self.now_us
            if self._stall_left_us:
                self._stall(min(left_us, self._stall_left_us), active)
                continue
            self._skip_cycles(left_us, active, slow_per_mille, gain, cost)
            left_us = end_us - self.now_us
            until_us = -(-(self._next_save - self.position) * cost // gain)
            self._work(min(left_us, until_us), active, slow_per_mille, gain, cost)
            if until_us <= left_us:
                self._saves.append((self.now_us, self.position))
                self.durable()
                self._stall_left_us = self._stall_us
                if not self._stall_us:
                    self._begin_cycle()

    def _skip_cycles(self, left_us: int, active: int, slow_per_mille: int, gain: int, cost: int) -> None:
        """Whole cycles of work and save but the last two, whose saves may still be on their way."""
        if self._next_save - self.position != self._save_work:
            return
        work_us = -(-self._save_work * cost // gain)
        num_cycles = left_us // (work_us + self._stall_us) - 2
        if num_cycles <= 0:
            return
        before = self.position
        self._book(num_cycles * work_us * active, num_cycles * self._save_work, slow_per_mille)
        self.rows[SAVE] += num_cycles * self._stall_us * active
        self.now_us += num_cycles * (work_us + self._stall_us)
        self._saves.clear()
        self._durable = before + num_cycles * self._save_work
        self._begin_cycle()

    def _work(self, wall_us: int, active: int, slow_per_mille: int, gain: int, cost: int) -> None:
        gained = min(wall_us * gain // cost, self._next_save - self.position)
        self._book(wall_us * active, gained, slow_per_mille)
        self.now_us += wall_us

    def _book(self, spent: int, gained: int, slow_per_mille: int) -> None:
        """Of the worker-time ``spent``, what is not gained was waiting for a slow rank or a snapshot; the fraction of a
        microsecond before a save counts as part of it."""
        self.position += gained
        waited = min(spent - gained, spent - spent * _PER_MILLE // slow_per_mille)
        self.rows[STRAGGLER] += waited
        rest = SNAPSHOT if self._snapshot_us else STRAGGLER if slow_per_mille > _PER_MILLE else SAVE
        self.rows[rest] += spent - gained - waited

    def _stall(self, wall_us: int, active: int) -> None:
        self.rows[SAVE] += wall_us * active
        self.now_us += wall_us
        self._stall_left_us -= wall_us
        if not self._stall_left_us:
            self._begin_cycle()
