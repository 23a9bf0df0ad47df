"""The result of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from closeranks.core.events import Evaluated


@dataclass(frozen=True, slots=True)
class Result:
    """The figures of a run that ended; everything else is in its folder."""

    steps: int
    """Optimizer steps finished, those before a resume included."""
    loss: float
    """The loss of the last step, over all ranks."""
    eval: Evaluated | None
    """The last evaluation, if there was one."""
    folder: Path
    reason: str
    """``finished``, ``drained`` (asked to stop), ``stopped`` (a hook or the loop said so) or ``failed``."""
    detail: str = ""
    """Why it stopped or failed, in words."""
