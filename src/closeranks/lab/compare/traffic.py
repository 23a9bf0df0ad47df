"""How many bytes does a step send? Pure but for ``recorded_step_times``.

Invariants: bytes are divided by the very steps in which they were sent, so that neither starting up nor a round whose
steps are told together weighs in; where no step is left to divide by, the answer is None, never 0.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from closeranks.core.events import StepDone
from closeranks.lab.compare.run_records import ComparisonRunFolder
from closeranks.telemetry.run_log.recorder import read_events
from closeranks.telemetry.run_log.run_folder import RunFolder

_TOGETHER = 0.5
"""A step that is told sooner after the one before it than this share of its own time was told together with it."""


def bytes_per_step(traffic: Sequence[tuple[float, int]], times: dict[int, float]) -> float | None:
    """What was sent after the first moment at which steps were told, by the number of steps since then."""
    if not traffic or not times:
        return None
    first_at = min(times.values())
    first, last = max(step for step, at in times.items() if at == first_at), max(times)
    if first == last:
        return None
    return (sent_until(traffic, times[last]) - sent_until(traffic, first_at)) / (last - first)


def sent_until(traffic: Sequence[tuple[float, int]], at: float) -> float:
    """Bytes at a moment, between two countings along a line."""
    place = bisect_left(traffic, at, key=lambda sample: sample[0])
    if place == 0:
        return float(traffic[0][1])
    if place == len(traffic):
        return float(traffic[-1][1])
    (left_at, left), (right_at, right) = traffic[place - 1], traffic[place]
    return left + (right - left) * (at - left_at) / (right_at - left_at)


def recorded_step_times(slot: ComparisonRunFolder) -> dict[int, float]:
    """The wall clock at which rank 0 told of each step."""
    path = RunFolder(slot.folder).metrics(0)
    lines = read_events(path) if path.exists() else ()
    return step_times((float(fields.get("at", 0.0)), event) for fields, event in lines if isinstance(event, StepDone))


def step_times(told: Iterable[tuple[float, StepDone]]) -> dict[int, float]:
    """Each step with the moment it was told. Where replicas train apart, the steps of a round are told one right after
    the other when they meet: they share the moment of the first."""
    times: dict[int, float] = {}
    before = moment = float("-inf")
    for at, done in told:
        if at - before >= _TOGETHER * done.seconds:
            moment = at
        times[done.step] = moment
        before = at
    return times
