"""Reconstructs the faults of a run and their cost from the agent's events. Pure.

Invariant: each fault is listed once, and time counts once: ranks that were lost during a recovery are recovered by the
same first good step. Durations are those the agent measured on its monotonic clock; the wall clock only gives the time
of day, and may have jumped.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from closeranks.core.events import Event, HostChanged, RankLost, RanksClosed, SlowRank, Standstill


@dataclass(frozen=True, slots=True)
class TimedEvent:
    """An event of the agent, and the wall-clock time when it was recorded."""

    at: float
    event: Event | None


@dataclass(frozen=True, slots=True)
class RunFault:
    """A fault that ended a generation (a lost rank, or another cause), and the first step finished after it."""

    at: float
    lost: RankLost
    closed: RanksClosed | None = None
    """None if the run ended before another step was finished."""
    is_followed: bool = False
    """Whether the next fault came before recovery was complete: both were recovered by the same step."""

    @property
    def generation(self) -> int:
        """The generation that took over, or would have."""
        return self.closed.generation if self.closed is not None else self.lost.generation + 1

    def lost_s(self, step_s: float) -> float:
        """Time without progress: until detection, until the first good step, and in steps done again.

        The first good step is included in ``closed.seconds``, but would have been run anyway, unless it repeats a step
        that had been finished before.
        """
        if self.closed is None or self.is_followed:
            return self.lost.detected_s
        return max(0.0, self.lost.detected_s + self.closed.seconds + (self.closed.num_redone - 1) * step_s)


@dataclass(frozen=True, slots=True)
class FaultHistory:
    """All faults and other incidents that the agent recorded, in order."""

    faults: tuple[RunFault, ...] = ()
    others: tuple[TimedEvent, ...] = ()
    """Slow ranks, standstills, and hosts that joined or left: they cost nothing by themselves."""

    @property
    def num_redone(self) -> int:
        return sum(fault.closed.num_redone for fault in self.faults if fault.closed and not fault.is_followed)

    def lost_s(self, step_s: float) -> float:
        return sum(fault.lost_s(step_s) for fault in self.faults)


def fault_history(lines: Iterable[TimedEvent]) -> FaultHistory:
    """The lines of ``metrics/agent.jsonl``, in order."""
    faults: list[RunFault] = []
    others: list[TimedEvent] = []
    waiting: list[RunFault] = []
    for line in lines:
        match line.event:
            case RankLost():
                if waiting and line.event.generation <= waiting[-1].lost.generation:
                    faults += waiting  # the run ended there; this is another launch of it
                    waiting = []
                waiting.append(RunFault(line.at, line.event))
            case RanksClosed():
                faults += _closed(waiting, line.event)
                waiting = []
            case SlowRank() | HostChanged() | Standstill():
                others.append(line)
    return FaultHistory((*faults, *waiting), tuple(others))


def _closed(waiting: list[RunFault], closed: RanksClosed) -> list[RunFault]:
    last = len(waiting) - 1
    return [RunFault(one.at, one.lost, closed, is_followed=place < last) for place, one in enumerate(waiting)]
