"""What befell a run, and what did it cost? The agent's own lines, folded. Pure.

Invariant: each fault is told once, and time counts once: ranks that were lost while ranks were being closed are closed
by the same first good step. Durations are those the agent measured on its monotonic clock; the wall clock only says
when, and may have jumped.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from closeranks.core.events import Event, HostChanged, RankLost, RanksClosed, SlowRank


@dataclass(frozen=True, slots=True)
class TimedEvent:
    """An event of the agent's, and the wall clock when it was recorded."""

    at: float
    event: Event | None


@dataclass(frozen=True, slots=True)
class RunFault:
    """A rank, or whatever else, that ended a generation, and the step that was first finished after it."""

    at: float
    lost: RankLost
    closed: RanksClosed | None = None
    """None where the run ended before another step was finished."""
    is_followed: bool = False
    """Whether the next fault came before ranks were closed: what closed that one closed this one."""

    @property
    def generation(self) -> int:
        """Which took over, or would have."""
        return self.closed.generation if self.closed is not None else self.lost.generation + 1

    def lost_s(self, step_s: float) -> float:
        """Time that did not train: until it was noticed, until the first good step, and in steps done again.

        The first good step is in ``closed.seconds`` and would have been made anyway, unless it is one that had been
        finished before.
        """
        if self.closed is None or self.is_followed:
            return self.lost.detected_s
        return max(0.0, self.lost.detected_s + self.closed.seconds + (self.closed.num_redone - 1) * step_s)


@dataclass(frozen=True, slots=True)
class FaultHistory:
    """All that the agent told of, in order."""

    faults: tuple[RunFault, ...] = ()
    others: tuple[TimedEvent, ...] = ()
    """Slow ranks and hosts that came or went: nothing was lost by them alone."""

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
            case SlowRank() | HostChanged():
                others.append(line)
    return FaultHistory((*faults, *waiting), tuple(others))


def _closed(waiting: list[RunFault], closed: RanksClosed) -> list[RunFault]:
    last = len(waiting) - 1
    return [RunFault(one.at, one.lost, closed, is_followed=place < last) for place, one in enumerate(waiting)]
