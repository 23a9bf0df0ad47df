"""Which bytes make up a rank's state, in which order do they lie in a slot, and how are they copied and digested?

A plan lists each range of each tensor once, as an entry: what a slot holds of it, and whether this rank writes it to
checkpoints, as one chunk. Invariants: the same tensors give the same plan; in a slot of the whole state every entry
begins at a multiple of 64 bytes; in one of what is saved alone, entries lie back to back, those with larger elements
first, so that all of them are aligned; a digest is of the bytes that were copied, taken in the same pass, while they
are in the processor's cache.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from crc32c import crc32c
from torch import Tensor

from closeranks.capture.shares import Holding, all_shares
from closeranks.capture.slots import Entry, Octets
from closeranks.capture.tensors import StateTensor

_ALIGN_BYTES = 64
BLOCK_BYTES = 1 << 20
"""Digested and copied at a time: fits a core's second-level cache. Each takes the interpreter's lock once or twice."""


@dataclass(frozen=True, slots=True)
class Span:
    """Elements ``first`` to ``last`` of a tensor, row by row."""

    tensor: int
    first: int
    last: int

    def of(self, tensor: Tensor) -> Tensor:
        """A view where memory lies that way, else a copy of little more than these elements."""
        source, first, last = tensor.detach(), self.first, self.last
        if not source.is_contiguous():
            row = prod(source.shape[1:])
            begin, end = first // row, -(-last // row)
            source, first, last = source[begin:end].contiguous(), first - begin * row, last - begin * row
        flat = source.view(-1)
        return flat if last - first == flat.numel() else flat[first:last]


@dataclass(frozen=True, slots=True)
class Plan:
    entries: tuple[Entry, ...]
    spans: tuple[Span, ...]
    """What each entry is of."""
    saved: tuple[int, ...]
    """Numbers of the entries that this rank writes to checkpoints, in the order in which they are packed."""
    packed: tuple[int, ...]
    """Where each of those lies, packed."""

    @property
    def num_bytes(self) -> int:
        return self.entries[-1].offset + self.entries[-1].num_bytes if self.entries else 0

    @property
    def num_saved_bytes(self) -> int:
        return self.packed[-1] + self.entries[self.saved[-1]].num_bytes if self.saved else 0


NOTHING = Plan((), (), (), ())


def plan(tensors: Sequence[StateTensor]) -> Plan:
    """``ValueError`` where a tensor is not of the shape that its piece says."""
    entries: list[Entry] = []
    spans: list[Span] = []
    saved: list[int] = []
    offset = 0
    for number, one in enumerate(tensors):
        tensor, item = one.tensor, one.tensor.element_size()
        if tuple(tensor.shape) != one.piece.local_shape:
            raise ValueError(f"{one.section}/{one.key} is {tuple(tensor.shape)}, not {one.piece.local_shape}")
        dtype = str(tensor.dtype).removeprefix("torch.")
        for share in all_shares(Holding(one.section, one.piece, item, one.holder, one.num_holders)):
            piece, num_bytes = share.piece, (share.last - share.first) * item
            where = (piece.shape, piece.start, piece.size, piece.flat)
            if one.is_ours and share.is_ours:
                saved.append(len(entries))
            entries.append(Entry(one.section, one.key, *where, dtype, offset, num_bytes))
            spans.append(Span(number, share.first, share.last))
            offset += -(-num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
    saved.sort(key=lambda number: -tensors[spans[number].tensor].tensor.element_size())
    packed, offset = [], 0
    for number in saved:
        packed.append(offset)
        offset += entries[number].num_bytes
    return Plan(tuple(entries), tuple(spans), tuple(saved), tuple(packed))


def signature(tensors: Iterable[StateTensor]) -> tuple[Any, ...]:
    """All that a plan depends on; comparing two costs far less than planning."""
    return tuple(
        (one.section, one.piece, one.tensor.dtype, one.holder, one.num_holders, one.is_ours) for one in tensors
    )


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


def num_digesters(num_ranks: int) -> int:
    """Threads of one rank, of so many on this host, that digest what a device sends or gets: one core keeps up with a
    fifth of its link."""
    return min(max(2, 3 * len(os.sched_getaffinity(0)) // (4 * num_ranks)), 12)


class Watch:
    """Notices tensors that are changed in place, by the counters that torch keeps. Views made by slicing share one with
    their base: a change anywhere in it counts. What is written past torch, or through ``.data``, goes unnoticed."""

    def __init__(self, tensors: Iterable[StateTensor]) -> None:
        # Tensors made for inference have no counter.
        self._marks = [(one, one.tensor._version) for one in tensors if not one.tensor.is_inference()]

    def changed(self) -> list[str]:
        """Which ones were changed since."""
        return [one.key for one, version in self._marks if one.tensor._version != version]
