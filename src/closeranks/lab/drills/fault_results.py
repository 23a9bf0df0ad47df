"""Computes the result of each fault of a drill, and of the drill as a whole. Pure.

Invariant: a fault counts as survived only if it was injected, was detected if it ends a generation, and the run
continued after it; a drill has passed only if every fault was survived and the run equals the one that never failed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from closeranks.core.events import RankLost, RanksClosed, SaveFailed, SlowRank
from closeranks.elastic.faults.fault import InjectedFault
from closeranks.elastic.faults.inject import Injection
from closeranks.lab.drills.recorded_run import RecordedRun, same_losses
from closeranks.telemetry.run_log.fault_history import TimedEvent

_LEAVING_S = 1.0
"""A worker that is asked to leave may take this long before that must be detected."""
_MISSED = "it was not injected: the run was over; with steps this short, train longer or ask for fewer faults"


@dataclass(frozen=True, slots=True)
class FaultResult:
    """The result of one fault: a line of the table."""

    fault: str
    detected_s: float | None = None
    """From the injection until the detection; None if nothing was detected."""
    back_s: float | None = None
    """From then until all ranks had finished a step."""
    num_redone: int | None = None
    survived: bool = False
    equal: bool = False
    note: str = ""


@dataclass(frozen=True, slots=True)
class DrillResult:
    """Everything that a drill found."""

    rows: tuple[FaultResult, ...]
    num_steps: int
    losses: bool
    state: str
    """How the last states differ; empty if they are equal."""
    samples: bool | None
    """Whether each step took the same samples; None if that was not recorded."""
    tolerance: float = 0.0
    """0: every bit was compared. Above 0: the run was resized, and is compared within this tolerance."""
    failure: str = ""
    """Why the disturbed run did not finish; empty if it did."""

    @property
    def has_passed(self) -> bool:
        is_equal = self.losses and not self.state and self.samples is not False
        return is_equal and not self.failure and all(row.survived and row.equal for row in self.rows)

    @property
    def sentence(self) -> str:
        num = len(self.rows)
        survived = sum(row.survived for row in self.rows)
        head = f"{survived} of {num} fault{'s' if num != 1 else ''} survived"
        if self.failure:
            return f"{head}; the run ended: {self.failure.splitlines()[0]}"
        if not self.losses:
            return f"{head}, but the losses are not those of the run that never failed."
        if self.state:
            return f"{head}, but {self.state}."
        if self.samples is False:
            return f"{head}, but some steps took other samples than the run that never failed."
        how = f"equal up to {self.tolerance:g}, because the run was resized" if self.tolerance else "equal in every bit"
        taken = ", the samples are the same" if self.samples else ""
        return f"{head}; the losses of all {self.num_steps} steps and the last state are {how}{taken}."


def fault_results(
    injections: Sequence[Injection],
    missed: Sequence[InjectedFault],
    undisturbed: RecordedRun,
    disturbed: RecordedRun,
    *,
    has_finished: bool,
    tolerance: float = 0.0,
) -> list[FaultResult]:
    """A row for every fault in the order of injection, then those not injected. ``has_finished`` is of the run."""
    ordered = sorted(injections, key=lambda injection: injection.at)
    rows = []
    for index, injection in enumerate(ordered):
        later = [other.step for other in ordered[index + 1 :] if other.step > injection.step]
        last = min([*(step - 1 for step in later), undisturbed.last_step])
        is_equal = same_losses(undisturbed, disturbed, max(1, injection.step), last, tolerance)
        rows.append(_row(injection, disturbed, is_equal, has_finished))
    return [*rows, *(FaultResult(str(fault), note=_MISSED) for fault in missed)]


def _row(injection: Injection, disturbed: RecordedRun, is_equal: bool, has_finished: bool) -> FaultResult:
    name, events = str(injection.fault), disturbed.events
    if injection.error:
        return FaultResult(name, equal=is_equal, note=f"it could not be injected: {injection.error}")
    if not injection.fault.about.ends_generation:
        detected_at = _detected_at(injection, events)
        if detected_at is None:
            return FaultResult(
                name, None, None, 0, has_finished, is_equal, f"{injection.note}; {injection.fault.about.unnoticed}"
            )
        return FaultResult(name, max(0.0, detected_at - injection.at), None, 0, has_finished, is_equal, injection.note)
    lost = _first(
        events, lambda line: isinstance(line.event, RankLost) and line.event.generation == injection.generation
    )
    closed = _first(
        events, lambda line: isinstance(line.event, RanksClosed) and line.event.generation > injection.generation
    )
    if (
        lost is None
        and injection.fault.kind == "term"
        and has_finished
        and disturbed.ended_at < injection.at + _LEAVING_S
    ):
        note = f"{injection.note}; the run was over before a worker had to leave"
        return FaultResult(name, None, None, 0, survived=True, equal=is_equal, note=note)
    if lost is None:
        return FaultResult(name, equal=is_equal, note=f"{injection.note}; it was never detected")
    if closed is None or not isinstance(closed.event, RanksClosed):
        what = "every step was finished already" if has_finished else "no step was finished after it"
        detected_s = max(0.0, lost.at - injection.at)
        return FaultResult(
            name, detected_s, None, 0 if has_finished else None, has_finished, is_equal, f"{injection.note}; {what}"
        )
    detected_at = closed.at - closed.event.seconds
    return FaultResult(
        name,
        max(0.0, detected_at - injection.at),
        closed.event.seconds,
        closed.event.num_redone,
        survived=True,
        equal=is_equal,
        note=injection.note,
    )


def _detected_at(injection: Injection, events: Sequence[TimedEvent]) -> float | None:
    """When a fault that does not end a generation was first reported."""

    def is_detection(line: TimedEvent) -> bool:
        match line.event:
            case SlowRank():
                return (
                    injection.fault.kind == "slow"
                    and line.event.rank == injection.fault.rank
                    and line.at >= injection.at
                )
            case SaveFailed():
                return injection.fault.kind == "diskfull" and line.at >= injection.at
        return False

    found = _first(events, is_detection)
    return found.at if found is not None else None


def _first(events: Sequence[TimedEvent], matches: Callable[[TimedEvent], bool]) -> TimedEvent | None:
    return next((line for line in events if matches(line)), None)


def is_resized(events: Sequence[TimedEvent], num_workers: int) -> bool:
    """Whether the run continued with another number of workers than it started with."""
    return any(isinstance(line.event, RanksClosed) and line.event.world_size != num_workers for line in events)
