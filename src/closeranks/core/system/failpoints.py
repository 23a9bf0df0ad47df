"""Failpoints: places where a test can kill a process, to prove that nothing is lost there.

Code that must survive a kill at any moment names its critical points: ``failpoint("manifest written")``. Nothing
happens unless the environment requests a kill at that label, or names a folder in which a test places kill requests: a
file named like a failpoint is consumed by the first process that reaches it. That process kills itself with SIGKILL,
which no handler can catch. Invariant: without a request a failpoint costs two comparisons; one request kills one
process.
"""

from __future__ import annotations

import os
import signal

from closeranks.core.system.environment import failpoint_folder, requested_failpoint

_REQUESTED = requested_failpoint()
_FOLDER = failpoint_folder()
_SEEN: dict[str, int] = {}
FAILPOINTS: dict[str, str] = {}
"""Every label declared by a module of this process, and its meaning."""


def declare_failpoint(label: str, meaning: str) -> str:
    """Declare a failpoint once, in the module that passes it; test sweeps find them all in ``FAILPOINTS``."""
    FAILPOINTS[label] = meaning
    return label


def failpoint(label: str) -> None:
    """Kill this process here if the environment names this label, at its n-th passing (``label`` or ``label:2``), or if
    the folder holds a request for it."""
    if _FOLDER:
        _kill_if_requested(label)
    if _REQUESTED is None or _REQUESTED[0] != label:
        return
    _SEEN[label] = _SEEN.get(label, 0) + 1
    if _SEEN[label] == _REQUESTED[1]:
        os.kill(os.getpid(), signal.SIGKILL)


def _kill_if_requested(label: str) -> None:
    try:
        os.unlink(os.path.join(_FOLDER, label))
    except FileNotFoundError:
        return
    os.kill(os.getpid(), signal.SIGKILL)
