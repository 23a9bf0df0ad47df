"""Pins the memory of a slot, so that a device can copy into it directly.

With pinned pages there is no staging buffer between device memory and the slot: training waits for the link alone. A
slot is pinned piece by piece, since this process cannot submit work to a device while one piece is being pinned.
Invariants: if CUDA refuses, nothing stays pinned and copies go through a staging buffer; no single device copy crosses
the end of a piece. Costs (measured on an H200) 0.1 s per GiB once for each slot and process, and 0.03 s per GiB when
the process ends, which must be over before another process replaces it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import torch

from closeranks.capture.slots import ByteArray

_PIECE_BYTES = 64 << 20
_PORTABLE = 1
"""``cudaHostRegisterPortable``: pinned for all devices."""
_PAUSE_S = 0.001
"""Pause between two pieces, in which waiting work can be submitted to the device."""
_log = logging.getLogger(__name__)


class PinnedMemory:
    """Memory of one slot. Call sequence: ``pin``, then ``copy_ranges`` if it succeeded; ``release`` before it is
    unmapped."""

    def __init__(self, memory: ByteArray) -> None:
        self.memory = memory
        self.is_pinned = False
        """Whether all of it is pinned."""
        self._pinned: list[int] = []

    def pin(self, is_enough: threading.Event) -> bool:
        """Not to be called on the training thread. False if CUDA refuses, as it may under a limit on locked memory, or
        if ``is_enough`` was set meanwhile."""
        cudart, address = torch.cuda.cudart(), self.memory.ctypes.data
        for start in range(0, len(self.memory), _PIECE_BYTES):
            size = min(_PIECE_BYTES, len(self.memory) - start)
            code = 0 if is_enough.is_set() else int(cudart.cudaHostRegister(address + start, size, _PORTABLE))
            if code or is_enough.is_set():
                self.release()
                _forget_error(len(self.memory), code)
                return False
            self._pinned.append(address + start)
            time.sleep(_PAUSE_S)
        self.is_pinned = True
        return True

    def copy_ranges(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Bytes ``start`` to ``end``, split at the boundaries that a single device copy must not cross."""
        while start < end:
            stop = min(end, (start // _PIECE_BYTES + 1) * _PIECE_BYTES)
            yield start, stop
            start = stop

    def release(self) -> None:
        """Unpin. No device copy may be in progress."""
        self.is_pinned = False
        while self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._pinned.pop())


def _forget_error(num_bytes: int, code: int) -> None:
    """CUDA keeps the error and reports it at this thread's next kernel launch: launch one here to clear it."""
    if code:
        _log.warning("CUDA cannot pin %d bytes of shared memory (error %d)", num_bytes, code)
        with suppress(RuntimeError):
            torch.zeros(1, device="cuda")
