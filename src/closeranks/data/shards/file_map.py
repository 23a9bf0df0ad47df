"""Memory-maps files, and gathers from many maps with one numpy call.

[Note: one window over all maps] A batch in random order touches as many files as it has samples, and a numpy call for
each would cost more than the bytes. All maps are in the address space of this process, so one array that begins at the
lowest of them and reaches past the highest, with a stride of one byte, has every run of bytes of every file as an
element; indexing it with addresses gathers from all files at once. Most of that array is not mapped at all. Invariant:
it is only ever indexed with addresses inside a map, which callers prove from the shards' sizes before they index.

A map keeps no file descriptor (Python's own do, and a process has 1024 of them), and lives as long as any array that is
a view of it, even after its file was removed.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_FAILED = ctypes.c_void_p(-1).value
_POPULATE_READ = 22
_NO_ADVICE = frozenset((errno.EINVAL, errno.ENOSYS))
_MOST_WINDOW_BYTES = 1 << 15
"""numpy counts the bytes of an array in 63 bits, and addresses have 47: longer runs are copied one by one; at that
length, one call for each does not matter."""

_MOST_LENGTHS = 16


class FileMap:
    """A file's bytes, read-only, at ``address``."""

    def __init__(self, fd: int, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        address = _LIBC.mmap(None, num_bytes, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
        if address == _FAILED:
            self.address = 0
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self.address = int(address)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"version": 3, "shape": (self.num_bytes,), "typestr": "|u1", "data": (self.address, True)}

    def bytes(self) -> npt.NDArray[np.uint8]:
        """An array that keeps this map alive, as do its views."""
        return np.asarray(self)

    def touch(self, start: int, num_bytes: int) -> None:
        """Read a range into memory, so that an I/O error or a truncated file raises ``OSError`` here instead of killing
        the process at the first access. Not supported by Linux before 5.14."""
        first = start & -mmap.PAGESIZE
        if _LIBC.madvise(self.address + first, start + num_bytes - first, _POPULATE_READ):
            number = ctypes.get_errno()
            if number not in _NO_ADVICE:
                raise OSError(number, os.strerror(number if number != errno.EFAULT else errno.EIO))

    def __del__(self, munmap: Callable[[int, int], int] = _LIBC.munmap) -> None:
        """``munmap`` is an argument because module globals are gone when the interpreter exits."""
        if self.address:
            munmap(self.address, self.num_bytes)


class _Span:
    def __init__(self, first: int, last: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "shape": (last - first,),
            "typestr": "|u1",
            "data": (first, True),
        }


class GatherWindow:
    """Gathers runs of bytes by address; see the note above."""

    def __init__(self) -> None:
        self._first = 0
        self._span: npt.NDArray[np.uint8] = np.empty(0, dtype=np.uint8)
        self._runs: dict[int, npt.NDArray[Any]] = {}

    def reach(self, maps: Iterable[FileMap]) -> int:
        """Extend the window over these maps; returns the address that counts as 0."""
        found = list(maps)
        self._first = min((each.address for each in found), default=0)
        last = max((each.address + each.num_bytes for each in found), default=0)
        self._span = np.asarray(_Span(self._first, last)) if found else np.empty(0, dtype=np.uint8)
        self._runs = {}
        return self._first

    def gather(self, at: npt.NDArray[np.int64], num_bytes: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """A copy of ``num_bytes`` from each address, as rows of ``dtype``."""
        if not 0 < num_bytes <= _MOST_WINDOW_BYTES:
            return self._copied(at, num_bytes, dtype)
        runs = self._runs.get(num_bytes)
        if runs is None:
            run = np.dtype((np.void, num_bytes))
            runs = np.ndarray((len(self._span) - num_bytes + 1,), run, self._span, strides=(1,))
            if len(self._runs) >= _MOST_LENGTHS:
                self._runs.clear()
            self._runs[num_bytes] = runs
        return runs[at].view(dtype).reshape(len(at), -1)

    def _copied(self, at: npt.NDArray[np.int64], num_bytes: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        rows = np.empty((len(at), num_bytes), dtype=np.uint8)
        for row, start in enumerate(at.tolist()):
            rows[row] = self._span[start : start + num_bytes]
        return rows.view(dtype)
