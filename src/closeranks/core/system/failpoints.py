"""Where can a process be made to die, to prove that nothing is lost there?

Code that must survive a kill at any moment names its moments: ``point("manifest written")``. Nothing happens unless the
environment asks for a death at that very label, or names a folder in which somebody outside leaves orders: a file that
is named like a point is taken by the first process that passes there. Whoever is meant kills itself with SIGKILL, which
no handler sees. Invariant: without a request a point costs two comparisons; one order costs one life.
"""

from __future__ import annotations

import os
import signal

from closeranks.core.system.environment import failpoint_folder, requested_failpoint

_DEATH = requested_failpoint()
_ORDERS = failpoint_folder()
_SEEN: dict[str, int] = {}
FAILPOINTS: dict[str, str] = {}
"""Every label that a module of this process declared, and what it stands for."""


def declare_failpoint(label: str, meaning: str) -> str:
    """Name a point once, where the module that passes it is defined; sweeps find them all in ``FAILPOINTS``."""
    FAILPOINTS[label] = meaning
    return label


def failpoint(label: str) -> None:
    """Die here if the environment names this label, at its n-th passing (``label`` or ``label:2``), or by an order."""
    if _ORDERS:
        _obey(label)
    if _DEATH is None or _DEATH[0] != label:
        return
    _SEEN[label] = _SEEN.get(label, 0) + 1
    if _SEEN[label] == _DEATH[1]:
        os.kill(os.getpid(), signal.SIGKILL)


def _obey(label: str) -> None:
    try:
        os.unlink(os.path.join(_ORDERS, label))
    except FileNotFoundError:
        return
    os.kill(os.getpid(), signal.SIGKILL)
