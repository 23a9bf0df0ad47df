"""How does a batch get from host memory to the device, beside the computation?

On CUDA a batch is copied to page-locked memory by the thread that loads it, and from there on a stream of its own; the
stream that computes waits for the copy, the host does not. Invariants: what is handed out may be used on the caller's
current stream at once; its memory is not used again before that stream is done with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from closeranks.core.protocols import Batch
from closeranks.data.loading.batch_reader import LoadedBatch, map_tensors


class DeviceTransfer:
    def __init__(self, device: torch.device | None) -> None:
        self.device = _indexed(device or torch.device("cpu"))
        self._is_cuda = self.device.type == "cuda"
        self._stream: torch.cuda.Stream | None = None

    @property
    def is_cuda(self) -> bool:
        return self._is_cuda

    def with_pinning(self, load: Callable[[int], list[LoadedBatch]]) -> Callable[[int], list[LoadedBatch]]:
        """``load``, with batches ready to be copied. A thread may be the one to call it."""
        if not self._is_cuda:
            return load

        def pinned(step: int) -> list[LoadedBatch]:
            # Pinning belongs to the thread's current device: left at 0, every rank would open a context there.
            torch.cuda.set_device(self.device)
            return [replace(one, batch=_mapped(one.batch, Tensor.pin_memory)) for one in load(step)]

        return pinned

    def to_device(self, loaded: list[LoadedBatch]) -> list[LoadedBatch]:
        """The same micro-batches on the device, for the caller's current stream."""
        if self.device.type == "cpu":
            return loaded
        if not self._is_cuda:
            return [replace(one, batch=_mapped(one.batch, self._plainly)) for one in loaded]
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        current = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self._stream):
            moved = [replace(one, batch=_mapped(one.batch, self._plainly)) for one in loaded]
        current.wait_stream(self._stream)
        for one in moved:
            map_tensors(one.batch, lambda tensor: _used_on(tensor, current))
        return moved

    def _plainly(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, non_blocking=True)


def _mapped(batch: Batch, apply: Callable[[Tensor], Tensor]) -> Batch:
    return cast(Batch, map_tensors(batch, apply))


def _used_on(tensor: Tensor, stream: torch.cuda.Stream) -> Tensor:
    tensor.record_stream(stream)
    return tensor


def _indexed(device: torch.device) -> torch.device:
    """``cuda`` means the current device of whoever says it; the background thread must not ask for itself."""
    is_bare = device.type == "cuda" and device.index is None
    return torch.device("cuda", torch.cuda.current_device()) if is_bare else device
