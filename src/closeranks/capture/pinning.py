"""May a device copy into a slot by itself?

Once the slot's pages are pinned: then nothing stands between the device's memory and the copy, and what training waits
for is the link alone. Pinned piece by piece, since a device takes no orders from this process meanwhile. Invariants:
where CUDA refuses nothing stays pinned, and copies go another way; no order to a device crosses the end of a piece.
Costs (measured on an H200) 0.1 s a GiB once for each slot and process, and 0.03 s a GiB when the process ends, which
must be over before another takes its place.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import torch

from closeranks.capture.slots import Octets

_PIECE_BYTES = 64 << 20
_PORTABLE = 1
"""``cudaHostRegisterPortable``: pinned for all devices."""
_PAUSE_S = 0.001
"""Between two pieces, for orders that wait."""
_log = logging.getLogger(__name__)


class Pinned:
    """Memory of one slot. Call sequence: ``pin``, then ``cuts`` if it succeeded; ``release`` before it is unmapped."""

    def __init__(self, memory: Octets) -> None:
        self.memory = memory
        self.is_whole = False
        """Whether all of it is pinned."""
        self._pinned: list[int] = []

    def pin(self, is_enough: threading.Event) -> bool:
        """Not on the thread that trains. False where CUDA refuses, as it may under a limit on locked memory, or where
        somebody had enough of it."""
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
        self.is_whole = True
        return True

    def cuts(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Bytes ``start`` to ``end``, cut where one order to a device has to end."""
        while start < end:
            stop = min(end, (start // _PIECE_BYTES + 1) * _PIECE_BYTES)
            yield start, stop
            start = stop

    def release(self) -> None:
        """No device may be copying."""
        self.is_whole = False
        while self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._pinned.pop())


def _forget_error(num_bytes: int, code: int) -> None:
    """The runtime remembers an error and blames this thread's next kernel for it: let it be one of ours."""
    if code:
        _log.warning("CUDA cannot pin %d bytes of shared memory (error %d)", num_bytes, code)
        with suppress(RuntimeError):
            torch.zeros(1, device="cuda")
