"""Where does a copy of the state lie while another process writes it?

In memory of the kernel's that has a file descriptor but no name: the writer maps the same pages, nothing is copied
between them, and nothing is left behind when both are gone. Costs as many bytes as it was ever asked to hold, for as
long as it is open. Invariant: what it held before it grew is not kept; nobody may be using it then.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import threading
from contextlib import suppress

import torch
from torch import Tensor

from closeranks.core.descriptors import unshare_memory

_POPULATE_WRITE = 23
"""``MADV_POPULATE_WRITE``, of Linux 5.14 and later: give these pages their memory now."""
_SLICE_BYTES = 2 << 20
"""Populated at a time: while it is at it, this process cannot map or unmap memory, as training does."""
_PORTABLE = 1
"""``cudaHostRegisterPortable``: pinned for all devices."""
_LIBC = ctypes.CDLL(None, use_errno=True)
_log = logging.getLogger(__name__)


class Buffer:
    """Call sequence: ``reserve``, then ``bytes`` and ``fd``; ``prefault`` or ``pin`` before its first use if that is to
    be fast; ``close``."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("closeranks-save", os.MFD_CLOEXEC)
        self.num_bytes = 0
        self.bytes = torch.empty(0, dtype=torch.uint8)
        """All of it, as a tensor."""
        self.is_pinned = False
        self._is_refused = False
        self._is_enough = threading.Event()

    def reserve(self, num_bytes: int) -> bool:
        """At least this many; whether it had to grow."""
        if num_bytes <= self.num_bytes:
            return False
        self._let_go()
        size = -(-num_bytes // _SLICE_BYTES) * _SLICE_BYTES
        os.ftruncate(self.fd, size)
        # The tensor holds the mapping, which goes when the last view of it does.
        self.bytes = torch.frombuffer(unshare_memory(mmap.mmap(self.fd, size)), dtype=torch.uint8)
        self.num_bytes = size
        return True

    def prefault(self) -> None:
        """Give all pages their memory in a thread that takes only what processor time nobody else wants. A first copy
        that does not wait for it stops it and pays itself."""
        self._is_enough.clear()
        threading.Thread(target=self._prefault, args=(self.bytes,), name="prefault", daemon=True).start()

    def stop_prefault(self) -> None:
        self._is_enough.set()

    def pin(self) -> bool:
        """Let devices copy into it by themselves; False where CUDA refuses, as it may under a limit on locked
        memory. Takes long for much memory: not on the thread that trains."""
        if not self.is_pinned and not self._is_refused and self.num_bytes:
            populate(self.bytes, threading.Event())
            code = int(torch.cuda.cudart().cudaHostRegister(self.bytes.data_ptr(), self.num_bytes, _PORTABLE))
            self.is_pinned, self._is_refused = code == 0, code != 0
            if self._is_refused:
                _log.warning("CUDA cannot pin %d bytes of shared memory (error %d)", self.num_bytes, code)
                # The runtime remembers the error and blames this thread's next kernel for it: let it be one of ours.
                with suppress(RuntimeError):
                    torch.zeros(1, device="cuda")
        return self.is_pinned

    def close(self) -> None:
        self._let_go()
        os.close(self.fd)

    def _let_go(self) -> None:
        self._is_enough.set()
        if self.is_pinned:
            torch.cuda.cudart().cudaHostUnregister(self.bytes.data_ptr())
        self.is_pinned = self._is_refused = False
        self.bytes, self.num_bytes = torch.empty(0, dtype=torch.uint8), 0

    def _prefault(self, memory: Tensor) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)  # of this thread alone
        populate(memory, self._is_enough)


def populate(memory: Tensor, is_enough: threading.Event) -> bool:
    """Slice by slice, without the interpreter's lock; False where it was stopped or the kernel does not know how."""
    for start in range(0, memory.numel(), _SLICE_BYTES):
        size = min(_SLICE_BYTES, memory.numel() - start)
        where = ctypes.c_void_p(memory.data_ptr() + start)
        if is_enough.is_set() or _LIBC.madvise(where, ctypes.c_size_t(size), _POPULATE_WRITE) != 0:
            return False
    return True
