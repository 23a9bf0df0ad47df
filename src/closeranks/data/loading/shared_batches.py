"""How does a batch get from the process that read it to its rank, without passing through a pipe?

The reading process writes tensors into slots, pieces of anonymous shared memory that have no name and so leave nothing
behind; what else a batch holds (strings, numbers) is pickled behind them. The rank sees the tensors where they lie.
Call sequence: ``SharedBatchWriter.put`` in the process; its ``SharedBatchRef`` and, for a new slot, the descriptor
travel by socket; ``SharedBatchReader.take`` in the rank; once the last tensor of a batch is gone the slot stands in
``SharedBatchReader.free`` and ``SharedBatchWriter.reuse`` gets its number. Invariant: a slot is written again only when
nobody in the rank can see it any more.
"""

from __future__ import annotations

import io
import math
import mmap
import os
import pickle
import weakref
from collections import deque
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Bytes: TypeAlias = npt.NDArray[np.uint8]

_ALIGN = 64
_SLOT_BYTES = 1 << 16


class SharedBatchRef(NamedTuple):
    """Where a batch lies: its slot, and the pickle in it that ties the tensors together."""

    slot: int
    header_at: int
    header_bytes: int
    dropped: tuple[int, ...] = ()
    """Slots that are too small by now and are not used again."""


class _Lying(NamedTuple):
    """A tensor in a slot."""

    at: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def view(self, slot: Bytes) -> Tensor:
        """Holds on to ``slot`` as long as it lives."""
        count = math.prod(self.shape)
        if not count:
            return torch.empty(self.shape, dtype=self.dtype)
        return torch.frombuffer(slot, dtype=self.dtype, count=count, offset=self.at).view(self.shape)


class _Packer(pickle.Pickler):
    """Leaves out every plain tensor and gives it a place in the slot."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[tuple[Tensor, _Lying]] = []
        self.end = 0

    def persistent_id(self, obj: Any) -> Any:
        if type(obj) is not Tensor or obj.layout is not torch.strided or obj.device.type != "cpu" or obj.is_quantized:
            return None
        lying = _Lying(_aligned(self.end), obj.dtype, tuple(obj.shape))
        self.tensors.append((obj.detach(), lying))
        self.end = lying.at + obj.numel() * obj.element_size()
        return tuple(lying)


class _Unpacker(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, slot: Bytes) -> None:
        super().__init__(stream)
        self._slot = slot

    def persistent_load(self, pid: Any) -> Tensor:
        return _Lying(*pid).view(self._slot)


class SharedBatchWriter:
    """The slots of one reading process. ``put`` takes a free one, or makes one that is large enough."""

    def __init__(self) -> None:
        self._slots: dict[int, Bytes] = {}
        self._free: deque[int] = deque()
        self._num_made = 0

    def put(self, value: Any) -> tuple[SharedBatchRef, int | None]:
        """The parcel, and the descriptor of its slot where the rank does not have it yet; the caller closes it."""
        stream = io.BytesIO()
        packer = _Packer(stream)
        packer.dump(value)
        header, header_at = stream.getbuffer(), _aligned(packer.end)
        slot, dropped, fd = self._room(header_at + len(header))
        memory = self._slots[slot]
        for tensor, lying in packer.tensors:
            lying.view(memory).copy_(tensor)
        memory[header_at : header_at + len(header)] = np.frombuffer(header, dtype=np.uint8)
        return SharedBatchRef(slot, header_at, len(header), dropped), fd

    def reuse(self, slot: int) -> None:
        """The rank has let go of a slot."""
        self._free.append(slot)

    def _room(self, num_bytes: int) -> tuple[int, tuple[int, ...], int | None]:
        """A slot of this size. One that is too small makes way for a larger one, so that their number stays."""
        if self._free:
            slot = self._free.popleft()
            if len(self._slots[slot]) >= num_bytes:
                return slot, (), None
            del self._slots[slot]
            return (*self._make(num_bytes, (slot,)),)
        return (*self._make(num_bytes, ()),)

    def _make(self, num_bytes: int, dropped: tuple[int, ...]) -> tuple[int, tuple[int, ...], int]:
        slot, self._num_made = self._num_made, self._num_made + 1
        fd = os.memfd_create("closeranks-batch", os.MFD_CLOEXEC)
        os.ftruncate(fd, padded_size(num_bytes))
        self._slots[slot] = np.frombuffer(mmap.mmap(fd, 0), dtype=np.uint8)
        return slot, dropped, fd


class SharedBatchReader:
    """The same slots as their rank sees them."""

    def __init__(self) -> None:
        self._slots: dict[int, mmap.mmap] = {}
        self._lent: dict[int, weakref.ref[Any]] = {}
        self.free: deque[int] = deque()
        """Slots that nobody sees any more; filled by whichever thread drops the last tensor."""

    def add(self, slot: int, fd: int) -> None:
        self._slots[slot] = mmap.mmap(fd, 0)

    def take(self, parcel: SharedBatchRef) -> Any:
        """What was put, its tensors still in the slot, which is lent until the last of them is gone."""
        for slot in parcel.dropped:
            del self._slots[slot]
        memory = np.frombuffer(self._slots[parcel.slot], dtype=np.uint8)
        header = memory[parcel.header_at : parcel.header_at + parcel.header_bytes].tobytes()
        # Every tensor in the slot holds this very array: when it goes, nobody sees the slot any more.
        self._lent[parcel.slot] = weakref.ref(memory, partial(self._give_back, parcel.slot))
        return _Unpacker(io.BytesIO(header), memory).load()

    def _give_back(self, slot: int, _: weakref.ref[Any]) -> None:
        self._lent.pop(slot, None)
        self.free.append(slot)


def padded_size(num_bytes: int) -> int:
    """A size with room for batches that are a little larger: up to a quarter more, in few distinct steps."""
    step = max(_SLOT_BYTES, 1 << max(0, num_bytes.bit_length() - 3))
    return -(-max(num_bytes, 1) // step) * step


def _aligned(at: int) -> int:
    return -(-at // _ALIGN) * _ALIGN
