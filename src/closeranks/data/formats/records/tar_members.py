"""Lists the members of a tar file and the positions of their bytes.

Headers are followed front to back over the mapped file (ustar, GNU and PAX names and sizes); the members themselves are
not read. Invariant: every header's checksum is right, every member is inside the file and the archive has its
end-of-archive marker, or a ``DataError`` names file, byte and reason: a truncated archive lacks samples, which no job
may ignore.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple, NoReturn
from zlib import adler32

import numpy as np
import numpy.typing as npt

from closeranks.core.errors import DataError
from closeranks.data.dataset_protocol import RecordLocation

BLOCK = 512
_ZEROS = bytes(BLOCK)
_ADLER = 65521
_REGULAR = b"0\x007"
_SPARSE = b"S"
_WITHOUT_DATA = b"123456"
"""Links, devices, folders and pipes: no data follows the header, whatever size it states."""
_LONG_NAME, _LONG_LINK, _PAX, _PAX_GLOBAL = b"L", b"K", b"x", b"g"
_KEY_AND_FIELD = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$", re.DOTALL)
_META = re.compile(r"__[^/]*__($|/)")
_NOTES = _LONG_NAME + _LONG_LINK + _PAX + b"X" + _PAX_GLOBAL


class TarMember(NamedTuple):
    name: str
    is_regular: bool
    """False for links, folders, devices and sparse files, whose bytes are not stored contiguously, or not at all."""
    header: int
    """Where it begins in the archive, for messages."""
    start: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class _Noted:
    """What extension headers said about the member that follows."""

    begin: int = -1
    name: str = ""
    size: int | None = None
    is_sparse: bool = False


_NOTHING = _Noted()


def split_name(name: str) -> tuple[str, str] | None:
    """WebDataset's rule: ``a/b.c/001.seg.PNG`` is field ``seg.png`` of ``a/b.c/001``; None for names without a
    field."""
    match = None if _META.match(name) else _KEY_AND_FIELD.match(name)
    return None if match is None else (match[1], match[2].lower())


def tar_members(view: npt.NDArray[np.uint8], full_name: str) -> Iterator[TarMember]:
    at = 0
    noted = _NOTHING
    while (block := view[at : at + BLOCK].tobytes()) != _ZEROS:
        if len(block) < BLOCK:
            _fail_without_end(full_name, at, len(block))
        kind = block[156:157]
        num_bytes = _size_in(block, full_name, at)
        start = at + BLOCK
        if kind in _NOTES:
            _check_inside(view, full_name, at, start + num_bytes, "a header")
            begin = at if noted.begin < 0 else noted.begin
            noted = replace(_note(kind, view[start : start + num_bytes].tobytes(), noted), begin=begin)
        else:
            name = noted.name or _name_in(block)
            num_bytes = 0 if kind in _WITHOUT_DATA else num_bytes if noted.size is None else noted.size
            start += _extra_blocks(view, start, block) if kind == _SPARSE else 0
            _check_inside(view, full_name, at, start + num_bytes, f"member '{name}'")
            is_regular = kind in _REGULAR and not noted.is_sparse and not name.endswith("/")
            yield TarMember(name, is_regular, at if noted.begin < 0 else noted.begin, start, num_bytes)
            noted = _NOTHING
        at = start + num_bytes + -num_bytes % BLOCK


def _size_in(block: bytes, full_name: str, at: int) -> int:
    """Checks the header's checksum first: only that distinguishes a header from any other 512 bytes."""
    try:
        checksum = block[148:156]
        found = int(checksum.strip(b"\0 "), 8) - 8 * 32 + sum(checksum)
        # The checksum is the sum of all bytes; Adler's lower half is that sum plus one, twenty times faster.
        is_sound = (found + 1) % _ADLER == adler32(block) & 0xFFFF
        field = block[124:136]
        size = int.from_bytes(field[1:], "big") if field[0] == 0x80 else int(field.strip(b"\0 ") or b"0", 8)
    except ValueError:
        is_sound, size = False, 0
    if not is_sound or size < 0:
        raise DataError(
            f"'{full_name}' is a damaged tar file: at byte {at} there is no member header",
            "Fetch or write the file again.",
        )
    return size


def _name_in(block: bytes) -> str:
    name = block[:100].partition(b"\0")[0]
    if block[257:263] == b"ustar\0" and (prefix := block[345:500].partition(b"\0")[0]):
        name = prefix + b"/" + name
    return name.decode("utf-8", "surrogateescape")


def _note(kind: bytes, data: bytes, noted: _Noted) -> _Noted:
    if kind == _LONG_NAME:
        return replace(noted, name=data.partition(b"\0")[0].decode("utf-8", "surrogateescape"))
    if kind in (_LONG_LINK, _PAX_GLOBAL):
        return noted
    fields = dict(_pax_fields(data))
    return _Noted(
        noted.begin,
        fields.get(b"path", noted.name.encode("utf-8", "surrogateescape")).decode("utf-8", "surrogateescape"),
        int(fields[b"size"]) if fields.get(b"size", b"").isdigit() else noted.size,
        any(name.startswith(b"GNU.sparse.") for name in fields),
    )


def _pax_fields(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Each is ``length key=value\\n``, where the length counts itself."""
    while data:
        length, _, rest = data.partition(b" ")
        if not length.isdigit() or not 0 < int(length) <= len(data):
            return
        name, _, value = rest[: int(length) - len(length) - 2].partition(b"=")
        yield name, value
        data = data[int(length) :]


def _extra_blocks(view: npt.NDArray[np.uint8], start: int, block: bytes) -> int:
    """Bytes of the extra headers of a sparse file in the old GNU format."""
    is_extended, extra = block[482] != 0, 0
    while is_extended and start + extra + BLOCK <= len(view):
        is_extended = bool(view[start + extra + 504])
        extra += BLOCK
    return extra


def _check_inside(view: npt.NDArray[np.uint8], full_name: str, at: int, end: int, what: str) -> None:
    if end > len(view):
        raise DataError(
            f"'{full_name}' is truncated: {what} at byte {at} ends at byte {end}, and the file at byte {len(view)}",
            "Fetch or write the file again.",
        )


def _fail_without_end(full_name: str, at: int, num_bytes: int) -> NoReturn:
    where = RecordLocation(full_name, at)
    if num_bytes:
        raise DataError(f"a tar file is truncated inside a header at {where}", "Fetch or write the file again.")
    raise DataError(
        f"a tar file has no end mark at {where}: it may have been cut short",
        "Fetch or write it again, or, if nothing is missing, append the mark: truncate -s +1024.",
    )
