"""Where the time of a step goes: a clock of this process attributes every instant to exactly one phase.

The step switches the clock from phase to phase (``run.step.step_timer``); code that may wait for other ranks, or does
something else for a while, wraps that in ``phase``. A phase with a dot is time spent waiting for a collective, as
``AXIS.COLLECTIVE``: communication that nothing hides. Without a clock, nothing here costs more than a lookup.
"""

from __future__ import annotations

from typing import Final, Protocol

DATA: Final = "data"
HOST_TO_DEVICE: Final = "host_to_device"
FORWARD: Final = "forward"
BACKWARD: Final = "backward"
OPTIMIZER: Final = "optimizer"
VOTE: Final = "vote"
OUTER_STEP: Final = "outer_step"
SNAPSHOT: Final = "snapshot"
SAVE: Final = "save"
EVALUATION: Final = "evaluation"
COMPILE: Final = "compile"
GC: Final = "gc"
TRACE: Final = "trace"
"""Starting, stopping and writing a trace."""
USER_CODE: Final = "user_code"
"""Hooks, and the user's own loop."""
OTHER: Final = "other"


class PhaseClock(Protocol):
    def switch(self, phase: str) -> str:
        """Enter a phase; returns the one that this ends."""
        ...


class PendingWork(Protocol):
    """A pending collective, or several: the part of ``dist.Work`` that a reduction needs."""

    def wait(self) -> object: ...


_clock: PhaseClock | None = None


def install_clock(clock: PhaseClock | None) -> None:
    """All phases of this process are measured by ``clock`` from now on; None: they are not measured."""
    global _clock
    _clock = clock


def installed_clock() -> PhaseClock | None:
    return _clock


def switch(name: str) -> str:
    """Enter a phase; returns the one that this ends."""
    return "" if _clock is None else _clock.switch(name)


def phase(name: str) -> Phase:
    """``with phase(GC): ...`` counts its time as that of another phase than the one around it."""
    return Phase(name)


class Phase:
    __slots__ = ("_name", "_outer")

    def __init__(self, name: str) -> None:
        self._name, self._outer = name, ""

    def __enter__(self) -> None:
        self._outer = switch(self._name)

    def __exit__(self, *error: object) -> None:
        if self._outer:
            switch(self._outer)


class TimedWork:
    """A pending collective whose ``wait`` is a phase."""

    __slots__ = ("_name", "_work")

    def __init__(self, work: PendingWork, name: str) -> None:
        self._work, self._name = work, name

    def wait(self) -> None:
        with phase(self._name):
            self._work.wait()
