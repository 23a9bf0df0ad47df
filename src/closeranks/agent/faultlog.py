"""Which faults has a run had, and what do they have in common?

[Note: the same fault] Two faults are the same when they ended the same step with the same signature, and the run had
got no further in between: to redo steps is no progress, to finish one for the first time is. So chance, which strikes
one step twice now and then, is told from a step that cannot be done. Invariant: the log is a value, and what it answers
follows from its entries alone; ends of a generation that nothing is wrong with leave no entry.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from closeranks.agent.verdict import Verdict

NO_FAULTS = frozenset({"slow", "preempted", "resize"})
"""Kinds of an end that nothing is wrong with: they use up no budget."""
_FROM_OUTSIDE = frozenset({"host", "zygote", "stopped"})
"""What no step does by itself, however often it is met there."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What ended a generation before its time."""

    at: float
    """``time.monotonic()`` of the lead."""
    generation: int
    kind: str
    step: int | None
    """The step it struck; None before the first of its generation."""
    rank: int
    """-1: nobody in particular."""
    host: str
    """Empty: none in particular."""
    signature: str
    """The same for the same fault, whichever rank or host it strikes."""
    num_done: int = 0
    """The most steps that the run had ever finished by then."""
    is_user_error: bool = False
    is_silent: bool = False
    """Whether nobody knows what ended it: a kill from outside it seems, or contact that was lost."""
    cause: str = ""
    """One line for people."""

    @property
    def can_repeat(self) -> bool:
        """Whether the code or the data of a step may be what does it."""
        return self.kind not in _FROM_OUTSIDE

    def is_same(self, other: Fault) -> bool:
        """See [Note: the same fault]."""
        ours = (self.step, self.kind, self.signature, self.num_done)
        return ours == (other.step, other.kind, other.signature, other.num_done)


@dataclass(frozen=True, slots=True)
class FaultLog:
    """The faults of a run so far, oldest first, and how far it ever got."""

    faults: tuple[Fault, ...] = ()
    num_done: int = 0

    def add(self, verdict: Verdict, *, at: float, generation: int, host: str, num_done: int) -> FaultLog:
        """A generation is over. ``num_done``: the steps that all of its ranks had finished (``steps_done``)."""
        if verdict.step is not None:  # whatever the others got to: the step that was struck is not finished
            num_done = min(num_done, verdict.step - 1)
        num_done = max(num_done, self.num_done)
        if verdict.kind in NO_FAULTS:
            return replace(self, num_done=num_done)
        fault = Fault(
            at=at,
            generation=generation,
            kind=verdict.kind,
            step=verdict.step,
            rank=verdict.culprit,
            host=host,
            signature=verdict.signature,
            num_done=num_done,
            is_user_error=verdict.is_user_error,
            is_silent=verdict.is_silent,
            cause=verdict.cause,
        )
        return FaultLog((*self.faults, fault), num_done)


def steps_done(steps: Iterable[int | None]) -> int:
    """How many steps all ranks have finished, from the step that each is at; None: at none yet."""
    return min((step - 1 if step else 0 for step in steps), default=0)


def num_repeats(faults: Sequence[Fault]) -> int:
    """How often the last fault has happened, itself included; 0 where a step cannot be blamed for it."""
    if not faults or not faults[-1].can_repeat:
        return 0
    return sum(fault.is_same(faults[-1]) for fault in faults)


def within(faults: Iterable[Fault], window_s: float, now: float) -> list[Fault]:
    """Those of the last ``window_s`` seconds."""
    return [fault for fault in faults if fault.at > now - window_s]


def tally(faults: Iterable[Fault]) -> str:
    """``18 killed, 3 hang, 19 of them on node-2``: what many faults have in common."""
    faults = list(faults)
    kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(fault.kind for fault in faults).most_common())
    hosts = Counter(fault.host for fault in faults if fault.host)
    if len(hosts) < 2:
        return kinds
    host, count = hosts.most_common(1)[0]
    return f"{kinds}; {count} of them on {host}"
