"""Computes how many bytes a step sends. Pure but for ``recorded_step_times``.

Invariants: bytes are divided by exactly those steps in which they were sent, so that neither startup nor steps that are
reported together distort the result; if no step is left to divide by, the result is None, never 0.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from closeranks.core.events import StepDone
from closeranks.lab.compare.run_records import ComparisonRunFolder
from closeranks.telemetry.run_log.recorder import read_events
from closeranks.telemetry.run_log.run_folder import RunFolder

_SAME_REPORT = 0.5
"""A step was reported together with the previous one if less than this share of its own duration lies between."""


def bytes_per_step(traffic: Sequence[tuple[float, int]], times: dict[int, float]) -> float | None:
    """Bytes sent after the first report of steps, divided by the number of steps since then."""
    if not traffic or not times:
        return None
    first_at = min(times.values())
    first, last = max(step for step, at in times.items() if at == first_at), max(times)
    if first == last:
        return None
    return (sent_until(traffic, times[last]) - sent_until(traffic, first_at)) / (last - first)


def sent_until(traffic: Sequence[tuple[float, int]], at: float) -> float:
    """Bytes sent until a moment, interpolated linearly between two samples."""
    index = bisect_left(traffic, at, key=lambda sample: sample[0])
    if index == 0:
        return float(traffic[0][1])
    if index == len(traffic):
        return float(traffic[-1][1])
    (left_at, left), (right_at, right) = traffic[index - 1], traffic[index]
    return left + (right - left) * (at - left_at) / (right_at - left_at)


def recorded_step_times(run_folder: ComparisonRunFolder) -> dict[int, float]:
    """The wall-clock time at which rank 0 reported each step."""
    path = RunFolder(run_folder.folder).metrics(0)
    lines = read_events(path) if path.exists() else ()
    return step_times((float(fields.get("at", 0.0)), event) for fields, event in lines if isinstance(event, StepDone))


def step_times(reports: Iterable[tuple[float, StepDone]]) -> dict[int, float]:
    """The time at which each step was reported.

    Under Local SGD and DiLoCo, the steps of a synchronization interval are reported one right after the other at its
    end: they share the time of the first.
    """
    times: dict[int, float] = {}
    last_at = reported_at = float("-inf")
    for at, done in reports:
        if at - last_at >= _SAME_REPORT * done.seconds:
            reported_at = at
        times[done.step] = reported_at
        last_at = at
    return times
