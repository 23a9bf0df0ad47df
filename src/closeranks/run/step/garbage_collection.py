"""Runs Python's garbage collector at the same steps on every rank.

A collection in the middle of a step stalls every other rank, and each rank would stall at a different time. Invariant:
between ``disable`` and ``enable`` it runs only at step boundaries, at the same steps on every rank.
"""

from __future__ import annotations

import gc


class GarbageCollection:
    def __init__(self, every: int) -> None:
        self._every = every
        self._was_enabled = self._has_frozen = False

    def disable(self) -> None:
        self._was_enabled = gc.isenabled()
        self._has_frozen = gc.get_freeze_count() == 0  # else the zygote froze all but the run's own objects
        gc.collect()
        if self._has_frozen:
            gc.freeze()  # modules, config and parameters live as long as the run: never traverse them again
        gc.disable()

    def run(self, step: int) -> None:
        if step % self._every == 0:
            gc.collect()  # what existed at the start is frozen: only the run's own objects are traversed

    def enable(self) -> None:
        if self._has_frozen:
            gc.unfreeze()
        if self._was_enabled:
            gc.enable()
