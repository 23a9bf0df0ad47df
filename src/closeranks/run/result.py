"""What did a run come to?"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from closeranks.core.events import Evaluated


@dataclass(frozen=True, slots=True)
class Result:
    """The figures of a run that ended; everything else stands in its folder."""

    steps: int
    """Optimizer steps finished, those before a resume included."""
    loss: float
    """Of the last step, over all ranks."""
    eval: Evaluated | None
    """The last evaluation, where there was one."""
    folder: Path
    reason: str
    """``finished``, ``drained`` (asked to stop), ``stopped`` (a hook or the loop said so) or ``failed``."""
    detail: str = ""
    """Why it stopped or failed, in words."""
