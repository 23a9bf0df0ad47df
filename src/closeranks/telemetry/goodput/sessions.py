"""When did each session of a run begin and end, and what ended it? Pure.

A session is one generation of one command: it begins when the command starts, or when a fault was noticed, and ends
when the next fault is noticed, or with the command. Invariant: the sessions of a command cover its time without a gap;
the time between two commands is in none. Instants are of the wall clock, durations of the agent's monotonic clock.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from closeranks.core.events import Launched, LaunchEnded, RankLost, RanksClosed, RunStarted
from closeranks.telemetry.run_log.fault_history import TimedEvent

_SKEW_S = 1.0
"""The agent records that it has heard of a start after it; on another host, clocks may differ by so much."""


@dataclass(frozen=True, slots=True)
class TimedStart:
    """Rank 0's ``run_started``, and the last time that anything was heard of before the next."""

    at: float
    started: RunStarted
    last_at: float


@dataclass(frozen=True, slots=True)
class SessionSpan:
    begin: float
    end: float
    world_size: int
    is_first: bool = True
    """Whether it was started by a command, and not by the recovery from a fault."""
    num_before: int = 0
    """Workers before the fault, which stood idle until it was recovered from."""
    started: RunStarted | None = None
    """None if no generation began."""
    detected_s: float | None = None
    """What ended it was a fault, which was noticed so much later than it happened."""
    num_faults: int = 0


def find_sessions(starts: Sequence[TimedStart], agent: Sequence[TimedEvent]) -> tuple[SessionSpan, ...]:
    """``starts`` and ``agent`` in the order of their recording."""
    found: list[SessionSpan] = []
    for group in _launches(starts):
        earliest = found[-1].end if found else 0.0
        window = _window(group, starts, agent)
        found += _sessions_of(group, window, earliest)
    return tuple(found)


def _launches(starts: Sequence[TimedStart]) -> list[list[TimedStart]]:
    """The starts of each command: generations are counted from 0 in each."""
    groups: list[list[TimedStart]] = []
    for start in starts:
        if not groups or start.started.generation <= groups[-1][-1].started.generation:
            groups.append([])
        groups[-1].append(start)
    return groups


def _window(group: Sequence[TimedStart], starts: Sequence[TimedStart], agent: Sequence[TimedEvent]) -> list[TimedEvent]:
    """The agent's events while a command ran, up to the first of the next."""
    until = next((one.at for one in starts if one.at > group[-1].at), float("inf"))
    began_at = group[0].at
    lines = [line for line in agent if line.at < until and line.at > _previous(starts, began_at)]
    places = [place for place, line in enumerate(lines) if isinstance(line.event, LaunchEnded)]
    # What an earlier command recorded after its rank 0's last words ends with its own end.
    earlier = [place for place in places if lines[place].at < began_at]
    return lines[earlier[-1] + 1 if earlier else 0 :]


def _previous(starts: Sequence[TimedStart], at: float) -> float:
    return max((one.at for one in starts if one.at < at), default=0.0)


def _sessions_of(group: Sequence[TimedStart], lines: Sequence[TimedEvent], earliest: float) -> list[SessionSpan]:
    begin = group[0].at - group[0].started.process_s
    for line in lines:  # an earlier command that was killed with its agent may be among them
        if isinstance(line.event, Launched) and line.at >= group[0].at - _SKEW_S:
            begin = min(begin, line.at - line.event.seconds)
    begins = [max(begin, earliest)]
    faults: list[list[TimedEvent]] = []
    for before, start in itertools.pairwise(group):
        lost = [line for line in lines if isinstance(line.event, RankLost) and before.at < line.at <= start.at]
        begins.append(max(begins[-1], min(start.at, _noticed(lines, lost, start, before))))
        faults.append(lost)
    rest = [line for line in lines if isinstance(line.event, RankLost) and line.at > group[-1].at]
    end = max(begins[-1], _end(group, lines))
    last_fault_at = min(end, rest[0].at) if rest else end
    sessions = []
    for place, start in enumerate(group):
        lost = faults[place] if place < len(faults) else rest
        until = begins[place + 1] if place + 1 < len(begins) else max(begins[-1], last_fault_at)
        is_fault = place < len(faults) or bool(rest)
        detected_s = next((line.event.detected_s for line in lost if isinstance(line.event, RankLost)), 0.0)
        sessions.append(
            SessionSpan(
                begins[place],
                until,
                start.started.world_size,
                is_first=place == 0,
                num_before=group[place - 1].started.world_size if place else 0,
                started=start.started,
                detected_s=detected_s if is_fault else None,
                num_faults=len(lost),
            )
        )
    if rest and end > sessions[-1].end:  # no generation came after it, or none yet
        num = sessions[-1].world_size
        sessions.append(SessionSpan(sessions[-1].end, end, num, is_first=False, num_before=num))
    return sessions


def _noticed(lines: Sequence[TimedEvent], lost: Sequence[TimedEvent], start: TimedStart, before: TimedStart) -> float:
    """When the fault before ``start`` was noticed: the agent measured it from there to the first finished step."""
    closed = next((line for line in lines if isinstance(line.event, RanksClosed) and line.at >= start.at), None)
    if closed is not None and isinstance(closed.event, RanksClosed):
        noticed_at = closed.at - closed.event.seconds
        if before.at < noticed_at <= start.at:  # else it was recovering from the fault before this one
            return noticed_at
    return lost[0].at if lost else min(before.last_at, start.at)


def _end(group: Sequence[TimedStart], lines: Sequence[TimedEvent]) -> float:
    ended = [line.at for line in lines if isinstance(line.event, LaunchEnded)]
    if ended:
        return ended[-1]
    heard = [line.at for line in lines if not isinstance(line.event, Launched)]
    return max(group[-1].last_at, *heard) if heard else group[-1].last_at
