"""Plans a capture: which bytes make up a rank's state, their order in a slot, and how they are copied and digested.

A plan lists each range of each tensor once, as an entry: what a slot holds of it, and whether this rank writes it to
checkpoints, as one chunk. Invariants: the same tensors give the same plan; in a slot for the whole state every entry
begins at a multiple of 64 bytes; in a slot for only the saved entries, they lie back to back, those with larger
elements first, so that all of them are aligned; a digest is taken of the copied bytes in the same pass, while they are
in the CPU cache.
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

from closeranks.capture.chunk_ranges import HeldPiece, chunk_ranges
from closeranks.capture.slots import ByteArray, SlotEntry
from closeranks.capture.tensors import StateTensor

_ALIGN_BYTES = 64
BLOCK_BYTES = 1 << 20
"""Digested and copied at a time: fits a core's L2 cache. Each block takes the GIL once or twice."""


@dataclass(frozen=True, slots=True)
class TensorRange:
    """Elements ``first`` to ``last`` of a tensor, in row-major order."""

    tensor: int
    first: int
    last: int

    def view_of(self, tensor: Tensor) -> Tensor:
        """A view if the tensor is contiguous, else a copy of little more than these elements."""
        source, first, last = tensor.detach(), self.first, self.last
        if not source.is_contiguous():
            row = prod(source.shape[1:])
            begin, end = first // row, -(-last // row)
            source, first, last = source[begin:end].contiguous(), first - begin * row, last - begin * row
        flat = source.view(-1)
        return flat if last - first == flat.numel() else flat[first:last]


@dataclass(frozen=True, slots=True)
class CapturePlan:
    entries: tuple[SlotEntry, ...]
    spans: tuple[TensorRange, ...]
    """The tensor range of each entry."""
    saved: tuple[int, ...]
    """Indices of the entries that this rank writes to checkpoints, in packed order."""
    packed: tuple[int, ...]
    """The offset of each of those when they are packed."""

    @property
    def num_bytes(self) -> int:
        return self.entries[-1].offset + self.entries[-1].num_bytes if self.entries else 0

    @property
    def num_saved_bytes(self) -> int:
        return self.packed[-1] + self.entries[self.saved[-1]].num_bytes if self.saved else 0


EMPTY_PLAN = CapturePlan((), (), (), ())


def plan_capture(tensors: Sequence[StateTensor]) -> CapturePlan:
    """``ValueError`` if a tensor does not have the shape of its piece."""
    entries: list[SlotEntry] = []
    spans: list[TensorRange] = []
    saved: list[int] = []
    offset = 0
    for number, one in enumerate(tensors):
        tensor, item = one.tensor, one.tensor.element_size()
        if tuple(tensor.shape) != one.piece.local_shape:
            raise ValueError(f"{one.section}/{one.key} is {tuple(tensor.shape)}, not {one.piece.local_shape}")
        dtype = str(tensor.dtype).removeprefix("torch.")
        for chunk_range in chunk_ranges(HeldPiece(one.section, one.piece, item, one.holder, one.num_holders)):
            piece, num_bytes = chunk_range.piece, (chunk_range.last - chunk_range.first) * item
            where = (piece.shape, piece.start, piece.size, piece.flat)
            if one.is_saved_here and chunk_range.is_saved_here:
                saved.append(len(entries))
            entries.append(SlotEntry(one.section, one.key, *where, dtype, offset, num_bytes))
            spans.append(TensorRange(number, chunk_range.first, chunk_range.last))
            offset += -(-num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
    saved.sort(key=lambda number: -tensors[spans[number].tensor].tensor.element_size())
    packed, offset = [], 0
    for number in saved:
        packed.append(offset)
        offset += entries[number].num_bytes
    return CapturePlan(tuple(entries), tuple(spans), tuple(saved), tuple(packed))


def plan_signature(tensors: Iterable[StateTensor]) -> tuple[Any, ...]:
    """Everything a plan depends on; comparing two signatures costs far less than planning."""
    return tuple(
        (one.section, one.piece, one.tensor.dtype, one.holder, one.num_holders, one.is_saved_here) for one in tensors
    )


def tensor_bytes(tensor: Tensor) -> ByteArray:
    """The memory of a CPU tensor as bytes; a copy of it if it is not contiguous."""
    array: ByteArray = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
    return array


def copy_and_digest(source: ByteArray, targets: Sequence[ByteArray]) -> int:
    """Copy the source to every target block by block and return its CRC32C; runs without the GIL."""
    if not targets:
        return int(crc32c(source.data))
    crc = 0
    for start in range(0, len(source), BLOCK_BYTES):
        block = source[start : start + BLOCK_BYTES]
        crc = crc32c(block.data, crc)
        for target in targets:
            np.copyto(target[start : start + BLOCK_BYTES], block)
    return int(crc)


def num_digest_threads(num_ranks: int) -> int:
    """How many threads each of ``num_ranks`` ranks on this host uses to digest what is copied from or to a device: one
    core keeps up with a fifth of the device's link."""
    return min(max(2, 3 * len(os.sched_getaffinity(0)) // (4 * num_ranks)), 12)


class VersionCounterCheck:
    """Detects in-place changes of tensors by torch's version counters. A view shares the counter of its base, so a
    change anywhere in the base counts. Writes that bypass torch, or go through ``.data``, are not detected."""

    def __init__(self, tensors: Iterable[StateTensor]) -> None:
        # Inference tensors have no version counter.
        self._versions = [(one, one.tensor._version) for one in tensors if not one.tensor.is_inference()]

    def changed(self) -> list[str]:
        """Keys of the tensors changed since construction."""
        return [one.key for one, version in self._versions if one.tensor._version != version]
