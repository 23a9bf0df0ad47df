"""Which tensors make up an image, in which order do their bytes lie, and how are they copied and digested?

Invariants: the same holdings give the same plan; every tensor begins at a multiple of 64 bytes; a digest is of the
bytes that were copied, taken in the same pass, while they are in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from crc32c import crc32c
from torch import Tensor

from closeranks.capture.tensors import StateTensor
from closeranks.core.pieces import Piece
from closeranks.elastic.slots import Entry, Octets, encode_entries

_ALIGN_BYTES = 64
ENTRY_BYTES = 16 << 20
"""Larger tensors are cut into entries: several threads digest them, and a damaged one is named more closely."""
BLOCK_BYTES = 1 << 20
"""Digested and copied at a time: fits a core's second-level cache. Each takes the interpreter's lock once or twice."""


@dataclass(frozen=True, slots=True)
class Span:
    """Elements ``first`` to ``last`` of a holding."""

    holding: int
    first: int
    last: int

    def of(self, tensor: Tensor) -> Tensor:
        """A view where the tensor is contiguous."""
        flat = tensor.detach().reshape(-1)
        return flat if self.last - self.first == flat.numel() else flat[self.first : self.last]


@dataclass(frozen=True, slots=True)
class Plan:
    """Where the bytes of all holdings lie, in order: no entry is of more than ``ENTRY_BYTES``."""

    entries: tuple[Entry, ...]
    spans: tuple[Span, ...]
    """What each entry is of."""
    encoded: bytes
    """The entries as they stand in every slot."""

    @property
    def num_bytes(self) -> int:
        return self.entries[-1].offset + self.entries[-1].num_bytes if self.entries else 0


NOTHING = Plan((), (), b"[]")


def plan(holdings: Sequence[StateTensor]) -> Plan:
    entries: list[Entry] = []
    spans: list[Span] = []
    offset = 0
    for number, held in enumerate(holdings):
        tensor, item = held.tensor, held.tensor.element_size()
        if tuple(tensor.shape) != held.piece.local_shape:
            raise ValueError(f"{held.section}/{held.key} is {tuple(tensor.shape)}, not {held.piece.local_shape}")
        for first, last in _ranges(tensor.numel(), ENTRY_BYTES // item):
            piece = held.piece if last - first == tensor.numel() else _part(held.piece, first, last)
            where = (piece.shape, piece.start, piece.size, piece.flat)
            dtype, num_bytes = str(tensor.dtype).removeprefix("torch."), (last - first) * item
            entries.append(Entry(held.section, held.key, *where, dtype, offset, num_bytes))
            spans.append(Span(number, first, last))
            offset += -(-num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
    return Plan(tuple(entries), tuple(spans), encode_entries(entries))


def _ranges(numel: int, at_once: int) -> Iterator[tuple[int, int]]:
    """An empty tensor has one range, which is empty."""
    yield from ((first, min(first + at_once, numel)) for first in range(0, max(numel, 1), at_once))


def _part(piece: Piece, first: int, last: int) -> Piece:
    begin = piece.flat[0] if piece.flat is not None else 0
    return piece.flattened(begin + first, begin + last)


def signature(holdings: Iterable[StateTensor]) -> tuple[Any, ...]:
    """All that a plan depends on; comparing two costs far less than planning."""
    return tuple((held.section, held.piece, held.tensor.dtype) for held in holdings)


def octets(tensor: Tensor) -> Octets:
    """The memory of a CPU tensor as bytes; a copy of it where it is not contiguous."""
    array: Octets = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
    return array


def copy_and_digest(source: Octets, targets: Sequence[Octets]) -> int:
    """CRC32C of the source, which is copied to every target block by block, without the interpreter's lock."""
    if not targets:
        return int(crc32c(source.data))
    crc = 0
    for start in range(0, len(source), BLOCK_BYTES):
        block = source[start : start + BLOCK_BYTES]
        crc = crc32c(block.data, crc)
        for target in targets:
            np.copyto(target[start : start + BLOCK_BYTES], block)
    return int(crc)


def num_digesters(num_cores: int, num_ranks: int) -> int:
    """Threads of one rank that digest what a device sends or gets: one core keeps up with a fifth of its link."""
    return min(max(2, 3 * num_cores // (4 * num_ranks)), 12)


class Watch:
    """Notices tensors that are changed in place, by the counters that torch keeps. What is written past torch, or
    through ``.data``, goes unnoticed."""

    def __init__(self, holdings: Iterable[StateTensor]) -> None:
        # Tensors made for inference have no counter.
        self._marks = [(held, held.tensor._version) for held in holdings if not held.tensor.is_inference()]

    def changed(self) -> list[str]:
        """Which ones were changed since."""
        return [held.key for held, version in self._marks if held.tensor._version != version]
