"""How did one rank spend its time? Folds its events, in order, into one record per session.

A session lasts from a ``run_started`` to the next: one generation of one command. Phases measure a step from its
beginning to that of the next, and are written a step later; so a rank that was killed leaves a step or two without
phases, for which the duration in ``step`` is taken. Invariants: incremental (a live run is folded as it goes), a few
numbers are kept per step, and a step that is done again no longer counts in the session that did it first. Of a long
run, steps may come summed up in blocks, which have one entry each.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping

from closeranks.core.events import Evaluated, Event, RunEnded, RunStarted, StepDone, StepPhases
from closeranks.core.phases import VOTE
from closeranks.telemetry.goodput.time_account import IN_PHASES
from closeranks.telemetry.run_log.step_blocks import StepBlock

_LOOK_BACK = 1024
"""Phases come at most so many steps after their step, or before it (the interval of local SGD)."""
_FIRST_STEPS = 64
_LONGEST_S = 1e9
"""30 years: no step is longer."""
_BUBBLE = "pipeline."
"""Stages wait for each other by design; the other axes only exchange."""
_DONE, _TAKEN, _PHASED, _SUMMED = 1, 2, 4, 8


class SessionRecord:
    """One rank in one session. The arrays are parallel, and in the order of the steps."""

    def __init__(self, started: RunStarted, at: float) -> None:
        self.started, self.at, self.last_at = started, at, at
        self.begun_at: float | None = None
        """When its first step began, on the wall clock; None before one is finished."""
        self.done_at: float | None = None
        """When the last step was finished."""
        self.closed_at: float | None = None
        """When the session ended in order."""
        self.lost_s: dict[str, float] = {}
        """Losses inside steps, by row."""
        self.phases_s = 0.0
        """All that is covered by phases, losses included."""
        self.useful_s = self.skipped_s = self.redone_s = 0.0
        self.cut_s = 0.0
        """In a step that a fault ended."""
        self.unphased_s = 0.0
        """Of these, what is taken from ``step`` because the phases are missing."""
        self.num_counted = self.num_items = self.num_redone = 0
        self.steps, self.waits = array("q"), array("d")
        """The steps that were not redone, and for how long each waited for other ranks."""
        self._seconds, self._kinds, self._items, self._nums = array("d"), array("b"), array("q"), array("q")
        self._sum_s = 0.0
        self._evals_s: dict[int, float] = {}

    @property
    def unphased_evals_s(self) -> float:
        """Evaluations after a step whose phases are missing."""
        return sum(self._evals_s.values())

    def is_counted(self, place: int) -> bool:
        return self._kinds[place] & (_TAKEN | _PHASED) == _TAKEN | _PHASED

    @property
    def num_summed(self) -> int:
        """Steps that count and are known only in sum."""
        both = _TAKEN | _SUMMED
        return sum(num for num, kind in zip(self._nums, self._kinds, strict=True) if kind & both == both)

    def add_block(self, block: StepBlock) -> None:
        """Steps that are known only in sum, after the other events among them."""
        self.last_at = max(block.at, self.last_at)
        lost = {name: _valid(block.phases[name]) for name in IN_PHASES if name in block.phases}
        for name, seconds in lost.items():
            self.lost_s[name] = self.lost_s.get(name, 0.0) + seconds
        self.phases_s += block.phases_s
        own_s = max(0.0, block.phases_s - sum(lost.values()))
        if not block.num_phases:
            own_s = block.seconds
            self.unphased_s += block.seconds
        else:
            self._evals_s = {step: s for step, s in self._evals_s.items() if not block.first <= step <= block.last}
            self._measured_in_block(block.num_phases)
        skipped_s = own_s * min(1.0, block.skipped_s / block.seconds) if block.seconds else 0.0
        self.done_at = block.at
        taken = (block.num - block.num_skipped, own_s - skipped_s, block.items - block.skipped_items)
        for kind, (num, seconds, items) in (
            (_DONE | _TAKEN | _SUMMED, taken),
            (_DONE | _SUMMED, (block.num_skipped, skipped_s, block.skipped_items)),
        ):
            if num or seconds:
                place = self._append(block.last)
                self._seconds[place], self._kinds[place] = seconds, kind
                self._items[place], self._nums[place] = items, num
                self._count(place, 1)

    def _measured_in_block(self, most: int) -> None:
        """The phases of the last steps before a block are among the sums of the block."""
        for place in range(len(self.steps) - 1, max(-1, len(self.steps) - 1 - most), -1):
            if self._kinds[place] & (_PHASED | _SUMMED):
                return
            self._count(place, -1)
            self.unphased_s -= self._seconds[place]
            self._seconds[place] = 0.0
            self._count(place, 1)

    def add(self, at: float, event: Event | None) -> None:
        self.last_at = max(at, self.last_at)
        match event:
            case StepDone():
                self._finish(at, event)
            case StepPhases():
                self._measure(event)
            case Evaluated():
                self._evals_s[event.step] = self._evals_s.get(event.step, 0.0) + _valid(event.seconds)
            case RunEnded(reason=reason) if reason != "failed":
                self.closed_at = at

    def rewind(self, step: int) -> None:
        """All later steps are done again, in another session."""
        while self.steps and self.steps[-1] > step:
            self.redone_s += self._seconds[-1]
            self.num_redone += self._nums[-1] if self._kinds[-1] & _DONE else 0
            self._count(-1, -1)
            for column in (self.steps, self.waits, self._seconds, self._kinds, self._items, self._nums):
                column.pop()

    def _finish(self, at: float, done: StepDone) -> None:
        seconds = _valid(done.seconds)
        self._sum_s += seconds
        if self.done_at is None or len(self.steps) < _FIRST_STEPS:  # local SGD reports the steps of an interval late
            self.begun_at = min(self.begun_at or at, at - self._sum_s)
        self.done_at = at
        place = self._place(done.step)
        if place is None:
            place = self._append(done.step)
            self._seconds[place] = seconds
            self.unphased_s += seconds
        else:
            self._count(place, -1)
        self._kinds[place] |= _DONE | (_TAKEN if done.taken else 0)
        self._items[place] = done.items
        self._count(place, 1)

    def _measure(self, measured: StepPhases) -> None:
        phases = {name: _valid(seconds) for name, seconds in measured.phases.items()}
        whole_s, lost = _valid(measured.seconds), {name: phases[name] for name in IN_PHASES if name in phases}
        for name, seconds in lost.items():
            self.lost_s[name] = self.lost_s.get(name, 0.0) + seconds
        self.phases_s += whole_s
        self._evals_s.pop(measured.step, None)
        place, own_s = self._place(measured.step), max(0.0, whole_s - sum(lost.values()))
        if place is not None and self._kinds[place] & _PHASED:  # a fault ended the step after it
            self.cut_s += own_s
            return
        summed = self._summed_place(measured.step) if place is None else None
        if summed is not None:  # the last step of a block
            self._count(summed, -1)
            self._seconds[summed] += own_s
            self._count(summed, 1)
            return
        if place is None:
            place = self._append(measured.step)
        else:
            self._count(place, -1)
            self.unphased_s -= self._seconds[place]
        self._seconds[place], self.waits[place] = own_s, _waiting_s(phases)
        self._kinds[place] |= _PHASED
        self._count(place, 1)

    def _place(self, step: int) -> int | None:
        last = len(self.steps) - 1
        for place in range(last, max(-1, last - _LOOK_BACK), -1):
            if self.steps[place] == step and not self._kinds[place] & _SUMMED:
                return place
            if self.steps[place] <= step or self._kinds[place] & _SUMMED:
                return None
        return None

    def _summed_place(self, step: int) -> int | None:
        """The entry of the block that has a step and is followed by no other block."""
        last = len(self.steps) - 1
        for place in range(last, max(-1, last - 8), -1):
            if self._kinds[place] & _SUMMED:
                return place if step <= self.steps[place] else None
        return None

    def _append(self, step: int) -> int:
        self.waits.append(0.0)
        self._seconds.append(0.0)
        self._kinds.append(0)
        self._items.append(0)
        self._nums.append(1)
        self.steps.append(step)
        return len(self.steps) - 1

    def _count(self, place: int, sign: int) -> None:
        """Add a step to the sums, or take it out again."""
        kind, seconds = self._kinds[place], sign * self._seconds[place]
        if kind & (_DONE | _TAKEN) == _DONE:
            self.skipped_s += seconds
            return
        self.useful_s += seconds
        if kind & _TAKEN:
            self.num_counted += sign * self._nums[place]
            self.num_items += sign * self._items[place]


class RankRecord:
    """All sessions of one rank."""

    def __init__(self) -> None:
        self.sessions: list[SessionRecord] = []
        self.last_at = 0.0
        self.energy: list[tuple[float, float]] = []
        """Joules that its accelerator took in an interval, and when that ended."""

    def add(self, at: float, event: Event | None) -> None:
        self.last_at = max(at, self.last_at)
        if isinstance(event, RunStarted):
            for session in self.sessions:
                session.rewind(event.first_step)
            self.sessions.append(SessionRecord(event, at))
        elif self.sessions:
            self.sessions[-1].add(at, event)

    def add_block(self, block: StepBlock) -> None:
        self.last_at = max(block.at, self.last_at)
        if block.energy_j:
            self.energy.append((block.energy_j, block.at))
        if self.sessions and block.num:
            self.sessions[-1].add_block(block)


def record_of(events: Iterable[tuple[float, Event | None]]) -> RankRecord:
    record = RankRecord()
    for at, event in events:
        record.add(at, event)
    return record


def _valid(seconds: float) -> float:
    """A file may have come from anywhere."""
    return seconds if 0 <= seconds < _LONGEST_S else 0.0


def _waiting_s(phases: Mapping[str, float]) -> float:
    """Waiting for other ranks. Where a rank waits for a collective, it waits for the last one to arrive."""
    return sum(s for name, s in phases.items() if name == VOTE or ("." in name and not name.startswith(_BUBBLE)))
