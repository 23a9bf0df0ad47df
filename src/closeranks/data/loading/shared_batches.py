"""Passes batches from a loader worker to its rank through shared memory instead of a pipe.

The worker writes tensors into slots: anonymous shared memory, which has no name and so leaves nothing behind. Other
contents of a batch (strings, numbers) are pickled after the tensors. The rank uses the tensors in place. Call sequence:
``SharedBatchWriter.put`` in the worker; its ``SharedBatchRef`` and, for a new slot, the descriptor are sent by socket;
``SharedBatchReader.take`` in the rank; once the last tensor of a batch is freed, the slot is listed in
``SharedBatchReader.free`` and its number is passed to ``SharedBatchWriter.reuse``. Invariant: a slot is overwritten
only when no reference to it is left in the rank.
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
    """Where a batch is: its slot, and the pickle in the slot that references the tensors."""

    slot: int
    header_at: int
    header_bytes: int
    dropped: tuple[int, ...] = ()
    """Slots that have become too small and are not used again."""


class _TensorRef(NamedTuple):
    """A tensor in a slot."""

    at: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def view(self, slot: Bytes) -> Tensor:
        """The view keeps ``slot`` alive."""
        count = math.prod(self.shape)
        if not count:
            return torch.empty(self.shape, dtype=self.dtype)
        return torch.frombuffer(slot, dtype=self.dtype, count=count, offset=self.at).view(self.shape)


class _Packer(pickle.Pickler):
    """Replaces every plain tensor in the pickle by a reference to its place in the slot."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[tuple[Tensor, _TensorRef]] = []
        self.end = 0

    def persistent_id(self, obj: Any) -> Any:
        if type(obj) is not Tensor or obj.layout is not torch.strided or obj.device.type != "cpu" or obj.is_quantized:
            return None
        tensor_ref = _TensorRef(_aligned(self.end), obj.dtype, tuple(obj.shape))
        self.tensors.append((obj.detach(), tensor_ref))
        self.end = tensor_ref.at + obj.numel() * obj.element_size()
        return tuple(tensor_ref)


class _Unpacker(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, slot: Bytes) -> None:
        super().__init__(stream)
        self._slot = slot

    def persistent_load(self, pid: Any) -> Tensor:
        return _TensorRef(*pid).view(self._slot)


class SharedBatchWriter:
    """The slots of one loader worker. ``put`` uses a free slot, or creates one that is large enough."""

    def __init__(self) -> None:
        self._slots: dict[int, Bytes] = {}
        self._free: deque[int] = deque()
        self._num_made = 0

    def put(self, value: Any) -> tuple[SharedBatchRef, int | None]:
        """The reference to the batch, and the slot's descriptor if the rank does not have it yet; the caller closes
        it."""
        stream = io.BytesIO()
        packer = _Packer(stream)
        packer.dump(value)
        header, header_at = stream.getbuffer(), _aligned(packer.end)
        slot, dropped, fd = self._slot_for(header_at + len(header))
        memory = self._slots[slot]
        for tensor, tensor_ref in packer.tensors:
            tensor_ref.view(memory).copy_(tensor)
        memory[header_at : header_at + len(header)] = np.frombuffer(header, dtype=np.uint8)
        return SharedBatchRef(slot, header_at, len(header), dropped), fd

    def reuse(self, slot: int) -> None:
        """The rank no longer uses this slot."""
        self._free.append(slot)

    def _slot_for(self, num_bytes: int) -> tuple[int, tuple[int, ...], int | None]:
        """A slot of at least this size. One that is too small is replaced by a larger one, so that the number of slots
        does not grow."""
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
    """The rank's view of a worker's slots."""

    def __init__(self) -> None:
        self._slots: dict[int, mmap.mmap] = {}
        self._lent: dict[int, weakref.ref[Any]] = {}
        self.free: deque[int] = deque()
        """Slots without references; appended by whichever thread frees the last tensor."""

    def add(self, slot: int, fd: int) -> None:
        self._slots[slot] = mmap.mmap(fd, 0)

    def take(self, ref: SharedBatchRef) -> Any:
        """The value that was put. Its tensors are views of the slot, which is in use until the last of them is
        freed."""
        for slot in ref.dropped:
            del self._slots[slot]
        memory = np.frombuffer(self._slots[ref.slot], dtype=np.uint8)
        header = memory[ref.header_at : ref.header_at + ref.header_bytes].tobytes()
        # Every tensor in the slot references this very array: when it is freed, the slot has no users left.
        self._lent[ref.slot] = weakref.ref(memory, partial(self._release, ref.slot))
        return _Unpacker(io.BytesIO(header), memory).load()

    def _release(self, slot: int, _: weakref.ref[Any]) -> None:
        self._lent.pop(slot, None)
        self.free.append(slot)


def padded_size(num_bytes: int) -> int:
    """A size with spare capacity for slightly larger batches: up to a quarter more, in few distinct steps."""
    step = max(_SLOT_BYTES, 1 << max(0, num_bytes.bit_length() - 3))
    return -(-max(num_bytes, 1) // step) * step


def _aligned(at: int) -> int:
    return -(-at // _ALIGN) * _ALIGN
