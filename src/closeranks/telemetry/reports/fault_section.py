"""Writes the section of a report about faults. Pure: a history in, a section of markdown out.

Invariant: a duration is shown only if the agent measured it; the total cost is the sum over all faults, with a note of
what it counts.
"""

from __future__ import annotations

from dataclasses import dataclass

from closeranks.core.events import HostChanged, Restored, SlowRank, Standstill
from closeranks.telemetry import formatting
from closeranks.telemetry.live import event_lines
from closeranks.telemetry.run_log.fault_history import RunFault, TimedEvent
from closeranks.telemetry.run_log.run_history import RunHistory

_ROWS_SHOWN = 40
_NOTHING = "-"


@dataclass(frozen=True, slots=True)
class _Row:
    at: float
    cells: tuple[str, ...]


def fault_section(history: RunHistory, *, failed: bool = False) -> str:
    """The table of faults and their cost; one sentence if there were none; empty if that sentence would mislead."""
    faults = history.fault_history
    kept = _kept(history)
    if not faults.faults and not faults.others:
        text = f"None was recorded. {kept}".rstrip()
        return "" if failed or not history.steps else f"## Faults\n\n{text}"  # a run that failed says why elsewhere
    rows = sorted((*_fault_rows(history), *_other_rows(history)), key=lambda row: row.at)
    table = [
        "| at | what happened | detected in | closed ranks in | steps redone | continued with |",
        "|---|---|---|---|---|---|",
        *(f"| {' | '.join(row.cells)} |" for row in rows[:_ROWS_SHOWN]),
    ]
    if len(rows) > _ROWS_SHOWN:
        table += ["", f"And {len(rows) - _ROWS_SHOWN} more, in `metrics/agent.jsonl`."]
    return "\n".join(["## Faults", "", *table, "", " ".join(filter(None, (_cost(history), kept)))])


def _kept(history: RunHistory) -> str:
    text = event_lines.snapshots_line(history.snapshots) if history.snapshots is not None else ""
    return f"{text[0].upper()}{text[1:]}." if text else ""


def _cost(history: RunHistory) -> str:
    faults = history.fault_history.faults
    if not faults:
        return ""
    lost_s, whole_s = history.lost_s, history.seconds
    share = f" of {formatting.duration(whole_s)} ({formatting.percent(lost_s / whole_s)})" if whole_s > lost_s else ""
    redone = formatting.count(history.fault_history.num_redone, "finished step")
    parts = f"until detected, until ranks were closed, and in doing {redone} again"
    return f"{formatting.count(len(faults), 'fault')}: {formatting.duration(lost_s)}{share} lost in all, {parts}."


def _when(history: RunHistory, at: float) -> str:
    return formatting.clock(at - history.starts[0].at) if history.starts else _NOTHING


def _fault_rows(history: RunHistory) -> list[_Row]:
    restored = {event.generation: event for event in history.restored}
    return [_fault_row(history, fault, restored) for fault in history.fault_history.faults]


def _fault_row(history: RunHistory, fault: RunFault, restored: dict[int, Restored]) -> _Row:
    lost, closed = fault.lost, fault.closed
    noticed = formatting.duration(lost.detected_s) if lost.detected_s > 0 else _NOTHING
    if closed is None:
        ending: tuple[str, ...] = (_NOTHING, _NOTHING, "the run ended")
    elif fault.is_followed:
        ending = (_NOTHING, _NOTHING, "another fault came first")
    else:
        workers = formatting.count(closed.world_size, "worker")
        source = restored[closed.generation].source if closed.generation in restored else ""
        went_on = ", ".join(filter(None, (workers, closed.layout, f"from {source}" if source else "")))
        ending = (formatting.duration(closed.seconds), str(closed.num_redone), went_on)
    return _Row(fault.at, (_when(history, fault.at), _in_a_cell(event_lines.lost_words(lost)), noticed, *ending))


def _other_rows(history: RunHistory) -> list[_Row]:
    return [_other_row(history, timed) for timed in history.fault_history.others]


def _other_row(history: RunHistory, timed: TimedEvent) -> _Row:
    match timed.event:
        case SlowRank():
            what = event_lines.slow_line(timed.event)
        case Standstill():
            what = event_lines.standstill_lines(timed.event)[0]
        case HostChanged():
            what = event_lines.host_line(timed.event)
        case _:
            what = ""
    return _Row(timed.at, (_when(history, timed.at), _in_a_cell(what), *[_NOTHING] * 4))


def _in_a_cell(text: str) -> str:
    return text.replace("|", "/").replace("\n", " ")
