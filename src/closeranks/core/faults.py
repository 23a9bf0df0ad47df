"""Where can a process be made to die, to prove that nothing is lost there?

Code that must survive a kill at any moment names its moments: ``point("manifest written")``. Nothing happens unless the
environment asks for a death at that very label; then this process kills itself with SIGKILL, which no handler sees.
Invariant: without that request a point costs one comparison.
"""

from __future__ import annotations

import os
import signal

from closeranks.core.environment import wanted_death

_DEATH = wanted_death()
_SEEN: dict[str, int] = {}
POINTS: dict[str, str] = {}
"""Every label that a module of this process declared, and what it stands for."""


def declare(label: str, meaning: str) -> str:
    """Name a point once, where the module that passes it is defined; sweeps find them all in ``POINTS``."""
    POINTS[label] = meaning
    return label


def point(label: str) -> None:
    """Die here if the environment names this label, at its n-th passing (``label`` or ``label:2``)."""
    if _DEATH is None or _DEATH[0] != label:
        return
    _SEEN[label] = _SEEN.get(label, 0) + 1
    if _SEEN[label] == _DEATH[1]:
        os.kill(os.getpid(), signal.SIGKILL)
