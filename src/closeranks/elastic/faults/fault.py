"""The kinds of faults that can be injected into a run, and faults as data: ``kill(rank=1, step=3)``.

Invariant: a fault is fully described by its fields and prints as the text it is parsed from, so that a campaign can be
recorded, repeated and shortened by hand. What each kind requires of the machine is in ``requirements``; ``inject``
injects them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from closeranks.core.errors import UserError


@dataclass(frozen=True, slots=True)
class FaultKind:
    """One kind of fault; ``fault_actions`` has its action."""

    name: str
    meaning: str
    """What is done from outside the worker, for ``closeranks drill --help``: at most 65 characters."""
    takes: tuple[str, ...] = ("rank",)
    """Arguments beside ``step`` and ``at``, in the order in which they are printed."""
    ends_generation: bool = True
    """Whether workers are lost by it; False: the run should continue unaffected."""
    num_ranks: int = 1
    """The minimum number of ranks it needs."""
    first_step: int = 1
    """The earliest step at which its effect can be detected."""
    may_miss: bool = False
    """Whether it may miss its moment, so that it needs some more steps to try again."""
    must_end: bool = False
    """Whether a lasting fault must be over before the last step."""
    unnoticed: str = "no event mentions it"
    """What a drill reports if the fault ended no generation and no event mentions it."""


KINDS = {
    kind.name: kind
    for kind in (
        FaultKind("kill", "SIGKILL to one worker"),
        FaultKind("kill2", "SIGKILL to two workers at once", ("rank", "other"), num_ranks=2),
        FaultKind("exception", "its connections are cut, so that its next collective raises", num_ranks=2),
        FaultKind("hang", "all its threads freeze (cgroup freezer, or SIGSTOP without one)"),
        FaultKind("stop", "SIGSTOP to one worker"),
        FaultKind(
            "slow",
            "it gets a share of one processor for some steps",
            ("rank", "steps", "share"),
            ends_generation=False,
            unnoticed="it was not reported as slow",
        ),
        FaultKind("oom", "no more memory for it: the kernel's out-of-memory killer ends it"),
        FaultKind("bitflip", "one bit of its newest snapshot is flipped, then SIGKILL"),
        # Both slots must have been written once before a torn one can be distinguished from an empty one.
        FaultKind("torn", "SIGKILL while it copies its state", first_step=3, may_miss=True),
        FaultKind(
            "diskfull",
            "no disk space for checkpoints for some steps",
            ("steps",),
            ends_generation=False,
            must_end=True,
            unnoticed="no save was affected by it",
        ),
        FaultKind("term", "SIGTERM to one worker, as a scheduler sends it"),
        FaultKind("zygote", "SIGKILL to the process that workers are forked from", ()),
    )
}

STEPS = 5
"""Default duration in steps of a lasting fault."""
SHARE = 0.2
"""Default share of one CPU that a slow worker gets."""


@dataclass(frozen=True, slots=True)
class InjectedFault:
    """One fault to inject. Arguments that its kind does not take keep their defaults."""

    kind: str
    step: int
    """It is injected when its target works on this step; the first is 1."""
    rank: int = 0
    other: int = 0
    """The second target of ``kill2``."""
    steps: int = STEPS
    share: float = SHARE
    at: float = 0.0
    """How far into the step, as a share of the duration of the target's previous step."""

    def __str__(self) -> str:
        values = [(name, getattr(self, name)) for name in self.about.takes]
        given = [(name, value) for name, value in values if name not in DEFAULTS or value != DEFAULTS[name]]
        ranks = [pair for pair in given if pair[0] in ("rank", "other")]
        rest = [pair for pair in given if pair not in ranks]
        arguments = [*ranks, ("step", self.step), *rest, *([("at", self.at)] if self.at else [])]
        return f"{self.kind}({', '.join(f'{name}={value!r}' for name, value in arguments)})"

    @property
    def about(self) -> FaultKind:
        return KINDS[self.kind]

    @property
    def victims(self) -> tuple[int, ...]:
        """Ranks that it hits; none if its target is not a worker."""
        return tuple(getattr(self, name) for name in ("rank", "other") if name in self.about.takes)

    @property
    def last_step(self) -> int:
        """The last step that the fault itself affects."""
        return self.step + self.steps - 1 if "steps" in self.about.takes else self.step


DEFAULTS = {"steps": STEPS, "share": SHARE}
"""Arguments that may be omitted, besides ``at``."""


def check_faults(faults: Sequence[InjectedFault], num_ranks: int, num_steps: int | None = None) -> None:
    """Reject faults that are not possible in this run. ``num_steps`` None: not known before the run has started."""
    for fault in faults:
        if fault.about.num_ranks > num_ranks:
            raise UserError(f"{fault}: {fault.kind} needs at least {fault.about.num_ranks} workers", "Start with -n 2.")
        if unknown := [rank for rank in fault.victims if rank >= num_ranks]:
            fix = f"The ranks of {num_ranks} workers are 0 to {num_ranks - 1}."
            raise UserError(f"{fault}: there is no rank {unknown[0]}", fix)
        if num_steps is None:
            continue
        if fault.step > num_steps:
            raise UserError(f"{fault}: the run has {num_steps} steps only", "Choose an earlier step.")
        if fault.about.must_end and fault.last_step >= num_steps:
            what = f"{fault}: {fault.kind} would still last after the last step, {num_steps}, whose state is compared"
            raise UserError(what, f"Keep step + steps at or below {num_steps}.")
