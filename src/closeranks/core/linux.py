"""How does a process make sure that it never outlives its parent?

Invariant: from ``die_with_parent`` on, the kernel kills this process when its parent ends, however the parent ends. A
parent that was gone before the call is noticed, too.
"""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
# Loaded once in the zygote: a forked child must not open libraries before it has tied itself to its parent.
_LIBC = ctypes.CDLL(None, use_errno=True)

ORPHANED = 111
"""Exit status of a process whose parent died before it could tie itself to it; nobody is left to read it."""


def die_with_parent(parent: int) -> None:
    """Ask for SIGKILL when the parent ends. ``parent`` is who it should be: checked after, for the race before."""
    argument = ctypes.c_ulong(signal.SIGKILL)
    if _LIBC.prctl(_PR_SET_PDEATHSIG, argument, ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl(PR_SET_PDEATHSIG): {os.strerror(code)}")
    if os.getppid() != parent:
        os._exit(ORPHANED)


def num_threads() -> int:
    """Threads of this process as the kernel counts them, those of C libraries included."""
    return len(os.listdir("/proc/self/task"))
