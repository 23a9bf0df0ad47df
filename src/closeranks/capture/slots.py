"""The format of one in-memory copy of a rank's state, and how to tell whether it is complete.

A slot is a file (anonymous, owned by the agent, memory-mapped) that holds one image at one step:

    header   256 bytes: what it is, how long its parts are, CRC32C of the index, CRC32C of the header itself
    data     tensors, each at a multiple of 64 bytes, from byte 4096 on
    index    which bytes are which tensor, the non-tensor part of the state, and CRC32C of every tensor's bytes

[Note: sealing] A writer first invalidates the header, then writes the data, then the index with the digests, then the
header, and last the eight bytes that make it valid. When a process is killed, every store up to the instruction it
died at remains in the shared memory: a valid header implies that everything written before it is there. A process
that dies earlier leaves a slot marked as torn, and the other slot of the pair untouched.

Invariants: a slot with flipped bits, a truncated file or a foreign file is never accepted as a copy: header and index
are checked by ``inspect_slot``, each tensor's bytes when they are read. A file only grows, and its memory is allocated
before anything is written: if there is none, ``reserve`` raises, so that no process is killed by a page fault that
cannot be served. Imports no torch.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import struct
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from crc32c import crc32c

from closeranks.core.system.failpoints import declare_failpoint, failpoint
from closeranks.core.system.fork_safety import exclude_from_fork
from closeranks.core.system.regular_file import open_descriptor

ByteArray = np.ndarray[Any, np.dtype[np.uint8]]

HEADER_BYTES, DATA_AT = 256, 4096
_MAGIC, _WRITING, _VOID, _NOTHING = b"CLRANKS1", b"CLRANKS~", b"CLRANKS!", bytes(8)
_BODY = struct.Struct("<IIQQIIQQII48s16s")
_CRC = struct.Struct("<I")
_LENGTHS = struct.Struct("<II")
_SLICE_BYTES = 2 << 20
_DIMS = 64
_PORTION_BYTES = 256 << 20
"""Pages populated by one thread at a time."""
_POPULATE_READ, _POPULATE_WRITE = 22, 23
"""``MADV_POPULATE_READ`` and ``MADV_POPULATE_WRITE`` (Linux 5.14 and later): map these pages now."""
_LIBC = ctypes.CDLL(None, use_errno=True)

AFTER_DATA = declare_failpoint("slot.after_data", "the tensors' bytes are copied, the index is not written")
AFTER_INDEX = declare_failpoint("slot.after_index", "data and index are written, the header still says torn")
BEFORE_HEADER = declare_failpoint("slot.before_header", "all of the header is written but the bytes that make it valid")
AFTER_HEADER = declare_failpoint("slot.after_header", "the slot is sealed, and nobody knows of it yet")


@dataclass(frozen=True, slots=True)
class SlotHeader:
    """What a slot holds. Images form one consistent state only if their slots have the same ``run``, ``generation``
    and ``step``."""

    generation: int
    step: int
    image: str
    num_images: int
    """How many different images make up the whole state."""
    layout: str = ""
    """A digest of the parallel layout: images of another layout must be resharded."""
    rank: int = 0
    """The rank whose state this is; a peer may hold the slot."""
    run: int = 0
    """Number of the session in its process: a script may open several."""

    @property
    def key(self) -> tuple[int, int, int]:
        """Identifies the state it belongs to; within a run, later states compare greater."""
        return self.run, self.step, self.generation


@dataclass(frozen=True, slots=True)
class SlotEntry:
    """Where the bytes of one tensor range lie in a slot."""

    section: str
    key: str
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    start: tuple[int, ...]
    size: tuple[int, ...]
    flat: tuple[int, int] | None
    dtype: str
    offset: int
    """From the beginning of the data."""
    num_bytes: int


@dataclass(frozen=True, slots=True)
class SlotIndex:
    entries: tuple[SlotEntry, ...]
    tree: dict[str, Any]
    crcs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SlotInspection:
    """Result of inspecting a slot: what it holds, or why it is not usable."""

    header: SlotHeader | None
    reason: str = ""
    """``empty``, ``torn: ...``, ``foreign: ...``, ``truncated: ...`` or ``damaged: ...``."""


def encode_entries(entries: Sequence[SlotEntry]) -> bytes:
    """The part of the index that stays the same from step to step."""
    rows = [[e.section, e.key, e.shape, e.start, e.size, e.flat, e.dtype, e.offset, e.num_bytes] for e in entries]
    return json.dumps(rows, separators=(",", ":")).encode()


def encode_index(entries: bytes, tree: bytes, crcs: Sequence[int]) -> bytes:
    return _LENGTHS.pack(len(entries), len(tree)) + entries + tree + np.asarray(crcs, "<u4").tobytes()


def decode_index(data: bytes) -> SlotIndex:
    first, second = _LENGTHS.unpack_from(data)
    begin = _LENGTHS.size
    rows, tree = json.loads(data[begin : begin + first]), json.loads(data[begin + first : begin + first + second])
    entries = tuple(
        SlotEntry(s, k, tuple(shape), tuple(start), tuple(size), tuple(flat) if flat else None, dtype, offset, num)
        for s, k, shape, start, size, flat, dtype, offset, num in rows
    )
    crcs = np.frombuffer(data, "<u4", offset=begin + first + second)
    return SlotIndex(entries, tree, tuple(crcs.tolist()))


class SnapshotSlot:
    """One file, open for writing. Call sequence: ``reserve``, ``invalidate``, fill ``data``, ``seal``."""

    def __init__(self, path: str | None = None) -> None:
        """``path`` None: anonymous memory, freed when the last process that has ``fd`` open closes it."""
        if path is None:
            self.fd = os.memfd_create("closeranks-private", os.MFD_CLOEXEC)
        else:
            self.fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._memory: mmap.mmap | None = None
        self.bytes: ByteArray = np.empty(0, np.uint8)
        """The whole file. A slice of it keeps the mapping alive."""
        self.lock = threading.Lock()
        """Held while memory is reserved or pinned."""
        self._num_populated = 0

    def reserve(self, num_data: int, num_index: int) -> None:
        """Make room for this many bytes and allocate the memory; ``OSError`` if there is none. Does not change whether
        the contents are valid."""
        wanted = _index_at(num_data) + num_index
        with self.lock:
            size = os.fstat(self.fd).st_size
            if size < wanted:
                # An index may grow from step to step, and remapping costs much more than the spare room.
                size = _round_up(wanted + num_index // 2, _SLICE_BYTES)
                os.posix_fallocate(self.fd, 0, size)
            if len(self.bytes) < wanted:
                self._memory = exclude_from_fork(mmap.mmap(self.fd, size))
                self.bytes = np.frombuffer(self._memory, np.uint8)
                self._num_populated = 0

    def data(self, num_data: int) -> ByteArray:
        return self.bytes[DATA_AT : DATA_AT + num_data]

    def populate(self, end: int) -> None:
        """Map the pages up to byte ``end`` of the data in bulk: with one page fault each, a first copy would take four
        times as long. Runs without the GIL; a kernel without ``MADV_POPULATE_WRITE`` falls back to the page faults."""
        self._num_populated = _populate(self.bytes, self._num_populated, DATA_AT + end, _POPULATE_WRITE)

    def populate_all(self, several: Callable[[Callable[[int], int], Iterable[int]], Iterable[int]]) -> None:
        """The same for the whole slot, with several threads (``Executor.map``): one core limits how fast the kernel
        clears pages."""

        def portion(start: int) -> int:
            return _populate(self.bytes, start, start + _PORTION_BYTES, _POPULATE_WRITE)

        portions = several(portion, range(self._num_populated, len(self.bytes), _PORTION_BYTES))
        self._num_populated = max(portions, default=self._num_populated)

    def invalidate(self) -> None:
        if len(self.bytes):
            self._writable()[:8] = _WRITING

    def seal(self, header: SlotHeader, num_data: int, index: bytes) -> None:
        """Write index and header; the data must be complete. The slot is valid from the last statement on."""
        failpoint(AFTER_DATA)
        memory, at = self._writable(), _index_at(num_data)
        memory[at : at + len(index)] = index
        failpoint(AFTER_INDEX)
        memory[8:HEADER_BYTES] = encode_header(header, num_data, index)[8:]
        failpoint(BEFORE_HEADER)
        memory[:8] = _MAGIC
        failpoint(AFTER_HEADER)

    def mark_void(self) -> None:
        """If nothing was ever written to the slot, mark it as abandoned (best effort), so that it is not taken for one
        that was never needed."""
        with suppress(OSError):
            if not os.pread(self.fd, len(_NOTHING), 0).strip(b"\0"):
                os.pwrite(self.fd, _VOID, 0)

    def close(self) -> None:
        self._memory, self.bytes = None, np.empty(0, np.uint8)
        os.close(self.fd)

    def _writable(self) -> mmap.mmap:
        assert self._memory is not None, "reserve comes first"
        return self._memory


def encode_header(header: SlotHeader, num_data: int, index: bytes) -> bytes:
    """A complete, valid header."""
    body = _BODY.pack(
        header.run,
        header.generation,
        header.step,
        num_data,
        header.rank,
        header.num_images,
        _index_at(num_data),
        len(index),
        crc32c(index),
        0,
        header.image.encode(),
        header.layout.encode(),
    )
    plain = (_MAGIC + body).ljust(HEADER_BYTES - _CRC.size, b"\0")
    return plain + _CRC.pack(crc32c(plain))


@dataclass(frozen=True, slots=True)
class SlotExtents:
    """Offsets and lengths of the parts of a sealed slot."""

    num_data: int
    index_at: int
    num_index: int
    index_crc: int


def decode_header(header: bytes) -> tuple[SlotHeader, SlotExtents] | str:
    """The decoded header, or a text that says what is wrong with it."""
    magic = bytes(header[:8])
    if magic == _WRITING:
        return "torn: it was being written"
    if magic == _VOID:
        return "damaged: it was marked as void"
    if len(header) < HEADER_BYTES or magic == _NOTHING:
        return "empty"
    if magic != _MAGIC:
        return f"foreign: it begins with {magic!r}"
    (found,) = _CRC.unpack_from(header, HEADER_BYTES - _CRC.size)
    if crc32c(header[: HEADER_BYTES - _CRC.size]) != found:
        return "damaged: its header does not match its checksum"
    run, generation, step, num_data, rank, num_images, at, num_index, crc, _, image, layout = _BODY.unpack_from(
        header, 8
    )
    name, layout_name = (text.rstrip(b"\0").decode(errors="replace") for text in (image, layout))
    return SlotHeader(generation, step, name, num_images, layout_name, rank, run), SlotExtents(
        num_data, at, num_index, crc
    )


class SealedSlot:
    """A slot open for reading, with a valid header and index; raises ``SlotError`` with the reason if it has none."""

    def __init__(self, path: str) -> None:
        self.path = path
        fd = open_descriptor(path)
        try:
            size = os.fstat(fd).st_size
            header = os.pread(fd, HEADER_BYTES, 0)
            decoded = decode_header(header)
            if isinstance(decoded, str):
                raise SlotError(decoded)
            self.header, self.extents = decoded
            end = self.extents.index_at + self.extents.num_index
            if end > size or DATA_AT + self.extents.num_data > self.extents.index_at:
                raise SlotError(f"truncated: {size} bytes, but its header says {end}")
            # Private, so that the mapping is writable, as torch requires of memory it wraps; it is never written to.
            self._memory = mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE)
        finally:
            os.close(fd)
        self.bytes: ByteArray = np.frombuffer(self._memory, np.uint8)
        self._index_bytes = self._memory[self.extents.index_at : end]
        if crc32c(self._index_bytes) != self.extents.index_crc:
            raise SlotError("damaged: its index does not match its checksum")
        self._index: SlotIndex | None = None
        self._num_populated = 0

    @property
    def index(self) -> SlotIndex:
        if self._index is None:
            try:
                self._index = decode_index(self._index_bytes)
                _check_index(self._index, self.extents.num_data)
            except (ValueError, TypeError, struct.error, RecursionError, OverflowError) as error:
                raise SlotError("damaged: its index is inconsistent") from error
        return self._index

    def data(self, entry: SlotEntry) -> ByteArray:
        """The bytes of an entry, not checked against their digest."""
        begin = DATA_AT + entry.offset
        if begin >= self._num_populated - _SLICE_BYTES:
            self._num_populated = _populate(self.bytes, self._num_populated, begin + entry.num_bytes, _POPULATE_READ)
        return self.bytes[begin : begin + entry.num_bytes]

    def read(self, entry: SlotEntry, place: ByteArray) -> None:
        """Read the same bytes into existing memory. Maps no pages: for large data that several threads read once, this
        takes a third of the time."""
        fd, at = open_descriptor(self.path), 0
        try:
            while at < entry.num_bytes:
                num = os.preadv(fd, [place[at : entry.num_bytes].data], DATA_AT + entry.offset + at)
                if not num:
                    raise SlotError(f"truncated: it ends within {entry.section}/{entry.key}")
                at += num
        finally:
            os.close(fd)


def void_slot(path: str) -> None:
    """Mark a slot as void, so that it is never taken for a copy again."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.pwrite(fd, _VOID, 0)
    finally:
        os.close(fd)


def _check_index(index: SlotIndex, num_data: int) -> None:
    """Check types, bounds and numbers of dims: the file may come from anywhere."""
    if len(index.crcs) != len(index.entries) or type(index.tree) is not dict:
        raise ValueError
    for one in index.entries:
        numbers = (*one.shape, *one.start, *one.size, *(one.flat or (0, 0)), one.offset, one.num_bytes)
        is_typed = all(type(number) is int and 0 <= number < 2**63 for number in numbers)
        if not is_typed or any(type(text) is not str for text in (one.section, one.key, one.dtype)):
            raise ValueError
        if len(one.shape) > _DIMS or not len(one.shape) == len(one.start) == len(one.size):
            raise ValueError
        if any(first + size > whole for whole, first, size in zip(one.shape, one.start, one.size, strict=True)):
            raise ValueError
        if one.offset + one.num_bytes > num_data or (one.flat is not None and not one.flat[0] <= one.flat[1]):
            raise ValueError


class SlotError(Exception):
    """A file holds no usable copy, or bytes that do not match their digest; the message says which."""


def inspect_slot(path: str) -> SlotInspection:
    """Whether a file holds a copy, judging by header and index. Reads no tensor data."""
    try:
        return SlotInspection(SealedSlot(path).header)
    except SlotError as error:
        return SlotInspection(None, str(error))
    except OSError as error:
        return SlotInspection(None, f"damaged: it cannot be read ({error.strerror})")


def received_problem(file: ByteArray, extents: SlotExtents, index: bytes) -> str:
    """What is wrong with an index or the data it describes, checked before sealing; empty if all is right."""
    if crc32c(index) != extents.index_crc:
        return "arrived with a different index"
    decoded = decode_index(index)
    for entry, crc in zip(decoded.entries, decoded.crcs, strict=True):
        begin = DATA_AT + entry.offset
        if crc32c(file[begin : begin + entry.num_bytes].data) != crc:
            return f"arrived with different bytes of {entry.section}/{entry.key}"
    return ""


def damage_message(sealed: SealedSlot, entry: SlotEntry) -> str:
    """The message for a copy whose bytes changed in memory."""
    header = sealed.header
    return (
        f"the copy of {header.image} at step {header.step} is damaged: the bytes of {entry.section}/{entry.key} changed"
    )


def _populate(memory: ByteArray, start: int, end: int, how: int) -> int:
    """Map pages slice by slice, without the GIL; returns the offset up to which they are mapped."""
    while start < min(end, len(memory)):
        size = min(_SLICE_BYTES, len(memory) - start)
        _LIBC.madvise(ctypes.c_void_p(memory.ctypes.data + start), ctypes.c_size_t(size), how)
        start += size
    return start


def _index_at(num_data: int) -> int:
    return _round_up(DATA_AT + num_data, 64)


def _round_up(number: int, to: int) -> int:
    return -(-number // to) * to
