"""Which bytes of a rank's tensors go into a save, and where do they lie?

Invariants: a plan lists each byte this rank writes once, in the order in which the bytes lie back to back in a buffer
or a file; elements of more bytes come first, so that all of them are aligned; the same items give the same plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from closeranks.capture.tensors import StateTensor
from closeranks.checkpoint.digests import crc32c, item_bytes
from closeranks.checkpoint.manifest import Chunk
from closeranks.checkpoint.shares import Holding, shares
from closeranks.core.errors import CheckpointError

Array = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True)
class Slot:
    """Elements ``first`` to ``last`` of an item's memory, and where their bytes go."""

    item: int
    first: int
    last: int
    offset: int
    chunk: Chunk
    """Its ``crc32c`` is not known yet: 0."""


@dataclass(frozen=True, slots=True)
class Plan:
    slots: tuple[Slot, ...]

    @property
    def num_bytes(self) -> int:
        return self.slots[-1].offset + self.slots[-1].chunk.num_bytes if self.slots else 0


def plan(items: Sequence[StateTensor]) -> Plan:
    found: list[tuple[int, int, int, Chunk]] = []
    for number, item in enumerate(items):
        dtype, size = _described(item)
        holding = Holding(item.section, item.piece, size, item.holder, item.num_holders)
        for share in shares(holding):
            num_bytes = size * (share.last - share.first)
            chunk = Chunk(item.section, item.key, dtype, share.piece, num_bytes, 0)
            found.append((number, share.first, share.last, chunk))
    found.sort(key=lambda slot: -items[slot[0]].tensor.element_size())
    slots, offset = [], 0
    for number, first, last, chunk in found:
        slots.append(Slot(number, first, last, offset, chunk))
        offset += chunk.num_bytes
    return Plan(tuple(slots))


def signature(items: Sequence[StateTensor]) -> tuple[tuple[Any, ...], ...]:
    """All that a plan depends on; comparing two costs far less than planning."""
    return tuple(
        (item.section, item.key, item.piece, item.tensor.dtype, item.tensor.shape, item.holder, item.num_holders)
        for item in items
    )


def elements(tensor: Tensor, first: int, last: int) -> Tensor:
    """Elements ``first`` to ``last``, row by row, as bytes: a view where memory lies that way, else a copy of little
    more than them."""
    source = tensor.detach()
    if not source.is_contiguous():
        row = prod(source.shape[1:])
        begin, end = first // row, -(-last // row)
        source, first, last = source[begin:end].contiguous(), first - begin * row, last - begin * row
    return source.view(-1)[first:last].view(torch.uint8)


def host_bytes(tensor: Tensor) -> Array:
    """The memory of a contiguous tensor of bytes on the CPU."""
    array: Array = tensor.numpy()
    return array


class Watch:
    """Notices tensors that are changed in place, by the counters that torch keeps. Views made by slicing share one with
    their base: a change anywhere in it counts. What is written past torch, or through ``.data``, goes unnoticed."""

    def __init__(self, items: Iterable[StateTensor]) -> None:
        # Tensors made for inference have no counter.
        self._marks = [(item, item.tensor._version) for item in items if not item.tensor.is_inference()]

    def changed(self) -> str:
        """Which one was changed since: the first one's name, or nothing."""
        return next((item.key for item, version in self._marks if item.tensor._version != version), "")


class Straight:
    """Items as they are, for a save that training waits for: no copy of the CPU's tensors, and of a device's no more
    than the chunks somebody is looking at."""

    def __init__(self, items: Sequence[StateTensor]) -> None:
        self._items = items
        self._slots = plan(items).slots

    def chunks(self) -> tuple[Chunk, ...]:
        """With their digests: reads all of it once."""
        return tuple(replace(slot.chunk, crc32c=crc32c(self(n))) for n, slot in enumerate(self._slots))

    def __call__(self, number: int) -> memoryview:
        """The bytes of a chunk."""
        slot = self._slots[number]
        source = elements(self._items[slot.item].tensor, slot.first, slot.last)
        if source.is_cuda:  # pinned memory comes from a cache: each chunk of its own, and none is allocated twice
            source = torch.empty_like(source, device="cpu", pin_memory=True).copy_(source)
        return host_bytes(source).data


def _described(item: StateTensor) -> tuple[str, int]:
    """Its type and the size of an element, if it can be saved at all."""
    if tuple(item.tensor.shape) != item.piece.local_shape:
        what = f"{item.section}/{item.key} is {tuple(item.tensor.shape)} where {item.piece.local_shape} was to be saved"
        raise CheckpointError(what, "This is a defect of closeranks: please report it.")
    dtype = str(item.tensor.dtype).removeprefix("torch.")
    try:
        return dtype, item_bytes(dtype)
    except ValueError as error:
        raise CheckpointError(f"{item.section}/{item.key} cannot be saved: {error}") from error
