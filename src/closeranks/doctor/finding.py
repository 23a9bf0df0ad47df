"""What a rule says of a run: what is wrong, how that shows, what to change, and what the change would gain."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from closeranks.doctor.run_facts import RunFacts

LEAST_GAIN = 0.05
"""The share of a step below which a rule stays silent: runs of one job differ by a few percent anyway."""

FAULT = "fault-"
"""How the causes of interruptions begin."""


@dataclass(frozen=True, slots=True)
class SettingChange:
    """A line of the job file, which also works as an argument of ``closeranks train``."""

    key: str
    value: Any
    now: Any = None

    def __str__(self) -> str:
        return f"{self.key}={json.dumps(self.value)}"


@dataclass(frozen=True, slots=True)
class Finding:
    cause: str
    """A short constant name: ``input-bound``."""
    what: str
    """One sentence."""
    evidence: tuple[str, ...]
    """The figures that show it."""
    advice: str
    """What to do, in words."""
    changes: tuple[SettingChange, ...] = ()
    """The settings to change; empty where no setting helps."""
    gain: float = 0.0
    """The share of a step's time that the advice is expected to save; 0 if it is about something other than speed."""
    explains: frozenset[str] = frozenset()
    """Causes whose findings say less about the same seconds, and are left out."""
    is_error: bool = False
    """The result of the run is in doubt, or it stopped: comes before all that is merely slow."""

    @property
    def speedup(self) -> float:
        """How many times as fast steps come after the change."""
        return 1 / (1 - min(self.gain, 0.99))


Rule = Callable[[RunFacts], Iterable[Finding]]
"""Looks for one cause; yields nothing if it is not there, or if too little is known."""


def percent(share: float) -> str:
    return f"{100 * share:.0f}%" if share >= 0.0995 else f"{100 * share:.1f}%"


def milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
