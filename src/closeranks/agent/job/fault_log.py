"""The faults that a run has had, and which of them are the same fault repeated.

[Note: the same fault] Two faults are the same when they ended the same step with the same signature, and the run made
no progress in between: redoing steps is no progress, finishing one for the first time is. This tells a step that always
fails from chance faults that happen to hit one step twice. Invariant: the log is a value, and its answers follow from
its entries alone; a generation that ended without a fault leaves no entry.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from closeranks.agent.detection.root_cause import RootCause

NOT_FAULTS = frozenset({"slow", "preempted", "resize"})
"""Ends of a generation that are not faults: they use up no budget."""
_FROM_OUTSIDE = frozenset({"host", "zygote", "stopped"})
"""Kinds of fault that the code of a step cannot cause, however often they occur in it."""


@dataclass(frozen=True, slots=True)
class FaultRecord:
    """What ended a generation prematurely."""

    at: float
    """``time.monotonic()`` of the leader."""
    generation: int
    kind: str
    step: int | None
    """The step in which it occurred; None before the first step of its generation."""
    rank: int
    """-1: no rank in particular."""
    host: str
    """Empty: no host in particular."""
    signature: str
    """The same for the same fault, on whichever rank or host it occurs."""
    num_done: int = 0
    """The most steps that the run had ever finished by then."""
    is_user_error: bool = False
    is_silent: bool = False
    """Whether the cause is unknown: probably a kill from outside, or lost contact."""
    cause: str = ""
    """One line for people."""

    @property
    def can_repeat(self) -> bool:
        """Whether the code or the data of a step may be the cause."""
        return self.kind not in _FROM_OUTSIDE

    def is_same(self, other: FaultRecord) -> bool:
        """See [Note: the same fault]."""
        ours = (self.step, self.kind, self.signature, self.num_done)
        return ours == (other.step, other.kind, other.signature, other.num_done)


@dataclass(frozen=True, slots=True)
class FaultLog:
    """The faults of a run so far, oldest first, and how far it ever got."""

    faults: tuple[FaultRecord, ...] = ()
    num_done: int = 0

    def add(self, root_cause: RootCause, *, at: float, generation: int, host: str, num_done: int) -> FaultLog:
        """A generation is over. ``num_done``: the steps that all of its ranks had finished (``steps_done``)."""
        if root_cause.step is not None:  # however far other ranks got, the step of the fault is not finished
            num_done = min(num_done, root_cause.step - 1)
        num_done = max(num_done, self.num_done)
        if root_cause.kind in NOT_FAULTS:
            return replace(self, num_done=num_done)
        fault = FaultRecord(
            at=at,
            generation=generation,
            kind=root_cause.kind,
            step=root_cause.step,
            rank=root_cause.culprit,
            host=host,
            signature=root_cause.signature,
            num_done=num_done,
            is_user_error=root_cause.is_user_error,
            is_silent=root_cause.is_silent,
            cause=root_cause.cause,
        )
        return FaultLog((*self.faults, fault), num_done)


def steps_done(steps: Iterable[int | None]) -> int:
    """How many steps all ranks have finished, given the step that each one is computing; None: none yet."""
    return min((step - 1 if step else 0 for step in steps), default=0)


def num_repeats(faults: Sequence[FaultRecord]) -> int:
    """How often the last fault has occurred, itself included; 0 if no step can be its cause."""
    if not faults or not faults[-1].can_repeat:
        return 0
    return sum(fault.is_same(faults[-1]) for fault in faults)


def faults_within(faults: Iterable[FaultRecord], window_s: float, now: float) -> list[FaultRecord]:
    """The faults of the last ``window_s`` seconds."""
    return [fault for fault in faults if fault.at > now - window_s]


def summarize_faults(faults: Iterable[FaultRecord]) -> str:
    """``18 killed, 3 hang, 19 of them on node-2``: what many faults have in common."""
    faults = list(faults)
    kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(fault.kind for fault in faults).most_common())
    hosts = Counter(fault.host for fault in faults if fault.host)
    if len(hosts) < 2:
        return kinds
    host, count = hosts.most_common(1)[0]
    return f"{kinds}; {count} of them on {host}"
