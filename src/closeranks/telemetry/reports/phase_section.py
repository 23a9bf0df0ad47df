"""Writes the section of a report about where the time went. Pure: phases in, a section of markdown out."""

from __future__ import annotations

from closeranks.core import phases
from closeranks.telemetry import formatting
from closeranks.telemetry.run_log.phase_history import PhaseHistory, PhaseTimes

_SHOWN = 0.001
"""Phases with a smaller share are summed up in one row."""
_UNEVEN = 1.1
"""A rank is named if it spends this many times the mean of all ranks in a phase."""
_WORDS = {
    phases.DATA: "waiting for data",
    phases.HOST_TO_DEVICE: "copying batches to the device",
    phases.FORWARD: "forward",
    phases.BACKWARD: "backward",
    phases.OPTIMIZER: "gradient norm and optimizer",
    phases.VOTE: "vote, waiting for the slowest rank",
    phases.OUTER_STEP: "outer step",
    phases.SNAPSHOT: "snapshots",
    phases.SAVE: "saves",
    phases.EVALUATION: "evaluation",
    phases.COMPILE: "compiling",
    phases.GC: "garbage collection",
    phases.TRACE: "starting and writing a trace",
    phases.USER_CODE: "hooks and the user's own loop",
    phases.OTHER: "other",
}


def phase_section(
    history: PhaseHistory, skipped: frozenset[int] = frozenset(), plot: str = "", num_generations: int = 1
) -> str:
    """A table of the phases of a step, below their ``plot``; empty if none were recorded."""
    rows = history.table(skipped)
    shown = [row for row in rows if row.share >= _SHOWN]
    if not shown:
        return ""
    rest = sum(row.share for row in rows) - sum(row.share for row in shown)
    table = [
        "| phase | share of the time | median of a step | 99% of steps below | ranks |",
        "|---|---|---|---|---|",
        *(f"| {' | '.join(_cells(row, len(history.steps)))} |" for row in shown),
        *([f"| everything else | {formatting.percent(rest)} | | | |"] if rest > 0 else []),
    ]
    picture = [f"![Time of a step by phase, over the run and for each rank]({plot})", ""] if plot else []
    notes = [f"\nNote: {gap}." for gap in history.gaps(num_generations)]
    return "\n".join(["## Where the time went", "", *picture, *table, *notes])


def describe(name: str) -> str:
    """A phase in words; ``AXIS.COLLECTIVE`` is time spent waiting for a collective."""
    axis, dot, collective = name.partition(".")
    if not dot:
        return _WORDS.get(name, name)
    return f"waiting for {collective.replace('_', '-')} ({axis} axis)"


def _cells(row: PhaseTimes, num_ranks: int) -> tuple[str, ...]:
    ranks = ""
    if num_ranks > 1 and row.slowest_s > _UNEVEN * row.mean_s:
        ranks = f"rank {row.slowest_rank}: {_time(row.slowest_s)} on average"
    times = (_time(row.median_s), _time(row.p99_s))
    return describe(row.name), formatting.percent(row.share), *times, ranks


def _time(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else formatting.duration(seconds)
