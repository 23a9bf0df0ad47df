"""Finds a worker's snapshots and damages them on purpose.

Invariants: a flip changes exactly one bit, of bytes that a tensor is restored from; inspecting changes nothing.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass

from closeranks.capture.slots import (
    DATA_AT,
    HEADER_BYTES,
    SealedSlot,
    SlotError,
    SlotHeader,
    decode_header,
    encode_header,
)

_VALID = encode_header(SlotHeader(0, 0, "", 1), 0, b"")[:8]
"""How a sealed header begins."""


@dataclass(frozen=True, slots=True)
class DamageTarget:
    """A sealed snapshot of a rank's state, and where its tensors lie."""

    path: str
    step: int
    spans: tuple[tuple[int, int], ...]
    """Where tensors lie in the file: first byte, and how many."""


def newest_sealed(paths: Sequence[str]) -> DamageTarget | None:
    """The snapshot that a restart would use; None if there is none."""
    found: list[SealedSlot] = []
    for path in paths:
        try:
            found.append(SealedSlot(path))
        except SlotError:
            continue
    if not found:
        return None
    newest = max(found, key=lambda sealed: sealed.header.key)
    entries = [entry for entry in newest.index.entries if entry.num_bytes]
    return DamageTarget(
        newest.path, newest.header.step, tuple((DATA_AT + one.offset, one.num_bytes) for one in entries)
    )


def flip_bit(copy: DamageTarget, rng: random.Random) -> int:
    """Flip one bit of one tensor; returns the bit's number in the file."""
    first, num_bytes = rng.choice(copy.spans)
    place, bit = first + rng.randrange(num_bytes), rng.randrange(8)
    fd = os.open(copy.path, os.O_RDWR | os.O_CLOEXEC)
    try:
        byte = os.pread(fd, 1, place)[0]
        os.pwrite(fd, bytes([byte ^ 1 << bit]), place)
    finally:
        os.close(fd)
    return place * 8 + bit


class SlotHeaders:
    """The headers of some slots, for polling: reading them takes a few microseconds."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._fds = [os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in paths]
        self._before = self.are_torn()

    def are_torn(self) -> tuple[bool, ...]:
        """For each slot, whether it is being written now, or was when its writer died."""
        return tuple(_is_torn(header) for header in self._read())

    def is_writing(self, generation: int) -> bool:
        """Whether a worker of this generation is writing one of the slots now.

        A slot left torn by a worker that died looks the same. So a torn slot counts only if it was not torn at the
        previous call, or if the snapshot it overwrites is of this generation.
        """
        headers = self._read()
        torn = tuple(_is_torn(header) for header in headers)
        found = any(
            is_torn and (not was or _generation_below(header) == generation)
            for header, is_torn, was in zip(headers, torn, self._before, strict=True)
        )
        self._before = torn
        return found

    def _read(self) -> list[bytes]:
        return [os.pread(fd, HEADER_BYTES, 0) for fd in self._fds]

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.pop())


def _is_torn(header: bytes) -> bool:
    decoded = decode_header(header)
    return isinstance(decoded, str) and decoded.startswith("torn")


def _generation_below(header: bytes) -> int | None:
    """The generation whose snapshot is being overwritten: all but the first bytes of a header stay until the next one
    is sealed."""
    decoded = decode_header(_VALID + header[len(_VALID) :])
    return None if isinstance(decoded, str) else decoded[0].generation
