"""How far did a worker get, even one that was killed in the middle?

A word of shared memory that the worker writes and the agent reads: an anonymous file (memfd), which leaves nothing in
/dev/shm and lives as long as either of them holds it. Invariant: writing costs about a microsecond and never blocks;
each field is one aligned store, so that a reader meets at worst a new step beside the last phase.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from dataclasses import dataclass
from enum import IntEnum

_MAGIC = 0x434C4F5345524E4B
_HEAD = struct.Struct("<Q")
_BODY = struct.Struct("<qIIq")
_SIZE_BYTES = 64


class Phase(IntEnum):
    """What a worker is at; the report of a death says it in words."""

    START = 0
    DATA = 1
    COMPUTE = 2
    REDUCE = 3
    VOTE = 4
    UPDATE = 5
    EVALUATE = 6
    SAVE = 7
    END = 8


PHASE_WORDS = {
    Phase.START: "starting",
    Phase.DATA: "waiting for data",
    Phase.COMPUTE: "computing gradients",
    Phase.REDUCE: "reducing gradients",
    Phase.VOTE: "agreeing on the step",
    Phase.UPDATE: "updating weights",
    Phase.EVALUATE: "evaluating",
    Phase.SAVE: "saving",
    Phase.END: "ending",
}


@dataclass(frozen=True, slots=True)
class Progress:
    """The last that a worker wrote. ``step`` is None before the first."""

    step: int | None
    phase: Phase
    at: float
    """``time.monotonic()`` of the write: one clock for all processes of a host."""


class ProgressWord:
    """One worker's word. The agent creates it; the worker attaches to the descriptor that it is handed."""

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, _SIZE_BYTES)
        if _HEAD.unpack_from(self._memory, 0)[0] != _MAGIC:
            raise ValueError("this descriptor is not a progress word")

    def write(self, step: int, phase: int) -> None:
        """Step at work (-1: none yet) and phase, stamped with the time."""
        _BODY.pack_into(self._memory, 8, step, phase, 0, time.monotonic_ns())

    def read(self) -> Progress:
        step, phase, _, at_ns = _BODY.unpack_from(self._memory, 8)
        return Progress(step if step >= 0 else None, Phase(phase), at_ns / 1e9)

    def close(self) -> None:
        self._memory.close()


def create_progress() -> int:
    """A descriptor of a fresh word, at no step; the caller hands it on and closes it."""
    fd = os.memfd_create("closeranks-progress")
    os.ftruncate(fd, _SIZE_BYTES)
    os.pwrite(fd, _HEAD.pack(_MAGIC) + _BODY.pack(-1, Phase.START, 0, time.monotonic_ns()), 0)
    return fd
