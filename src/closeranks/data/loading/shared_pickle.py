"""Sends a dataset to the loader workers through shared memory.

It is pickled once into anonymous memory, which every worker maps: large arrays and tensors exist once for all workers
and are copied only on write. Invariant: what cannot be pickled is refused in the rank, in one sentence, before any
worker starts to read.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import struct
from typing import Any

import numpy as np
import torch
from torch import Tensor

from closeranks.core.errors import UserError
from closeranks.core.tracebacks import describe_error

_ALIGN = 64
_HEAD = struct.Struct("<QQ")
FIX = "Set data.workers = 0 to read in a thread of the rank, or make the dataset picklable."


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        """Plain tensors are sent like arrays: out of band, beside the pickle."""
        if type(obj) is not Tensor or obj.layout is not torch.strided or obj.device.type != "cpu":
            return NotImplemented
        if obj.requires_grad or obj.is_quantized or not obj.is_contiguous():
            return NotImplemented
        raw = obj.reshape(-1).view(torch.uint8).numpy()
        return _tensor_of, (pickle.PickleBuffer(raw.data), obj.dtype, tuple(obj.shape))


def _tensor_of(raw: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    values = np.frombuffer(raw, dtype=np.uint8)
    flat = torch.from_numpy(values if values.flags.writeable else values.copy()) if values.size else torch.empty(0)
    return flat.view(dtype).view(shape) if values.size else torch.empty(shape, dtype=dtype)


def pack(value: Any) -> int:
    """A descriptor of memory that holds ``value``; the caller closes it. ``UserError`` where it cannot be pickled."""
    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    try:
        _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(value)
    except Exception as error:
        raise UserError(f"this dataset cannot be sent to loader processes: {describe_error(error)}", FIX) from error
    raw = [buffer.raw() for buffer in buffers]
    head = _HEAD.pack(stream.tell(), len(raw)) + b"".join(struct.pack("<Q", piece.nbytes) for piece in raw)
    fd = os.memfd_create("closeranks-dataset", os.MFD_CLOEXEC)
    with open(os.dup(fd), "wb") as memory:
        pieces: list[bytes | memoryview] = [head, stream.getbuffer(), *raw]
        for piece in pieces:
            memory.write(piece)
            memory.write(bytes(-memory.tell() % _ALIGN))
    return fd


def unpack(fd: int) -> Any:
    """The value that was packed. Its arrays are in the memory of ``fd``; writing to one copies the page."""
    memory = memoryview(mmap.mmap(fd, 0, access=mmap.ACCESS_COPY))
    pickle_bytes, num_buffers = _HEAD.unpack_from(memory)
    sizes = struct.unpack_from(f"<{num_buffers}Q", memory, _HEAD.size)
    at, pieces = 0, []
    for size in (_HEAD.size + 8 * num_buffers, pickle_bytes, *sizes):
        pieces.append(memory[at : at + size])
        at = -(-(at + size) // _ALIGN) * _ALIGN
    try:
        return pickle.loads(pieces[1], buffers=pieces[2:])
    except Exception as error:
        raise UserError(f"this dataset fails to unpickle in loader processes: {describe_error(error)}", FIX) from error
