"""Copies batches from host memory to the device, overlapped with the computation.

On CUDA the thread that loads a batch copies it to page-locked (pinned) memory; from there it is copied to the device on
a separate stream. The compute stream waits for the copy, the host does not. Invariants: a returned batch can be used on
the caller's current stream at once; its memory is not reused before that stream has finished with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from closeranks.core.phases import HOST_TO_DEVICE, phase
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
        """``load``, with its batches in pinned memory. It may be called from a thread."""
        if not self._is_cuda:
            return load

        def pinned(step: int) -> list[LoadedBatch]:
            # Pinning uses the thread's current device: if that stayed 0, every rank would open a context on device 0.
            torch.cuda.set_device(self.device)
            return [replace(one, batch=_mapped(one.batch, Tensor.pin_memory)) for one in load(step)]

        return pinned

    def to_device(self, loaded: list[LoadedBatch]) -> list[LoadedBatch]:
        """The same micro-batches on the device, for the caller's current stream."""
        if self.device.type == "cpu":
            return loaded
        if not self._is_cuda:
            return [replace(one, batch=_mapped(one.batch, self._copy)) for one in loaded]
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        current = torch.cuda.current_stream(self.device)
        with phase(HOST_TO_DEVICE):
            with torch.cuda.stream(self._stream):
                moved = [replace(one, batch=_mapped(one.batch, self._copy)) for one in loaded]
            current.wait_stream(self._stream)
        for one in moved:
            map_tensors(one.batch, lambda tensor: _used_on(tensor, current))
        return moved

    def _copy(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, non_blocking=True)


def _mapped(batch: Batch, apply: Callable[[Tensor], Tensor]) -> Batch:
    return cast(Batch, map_tensors(batch, apply))


def _used_on(tensor: Tensor, stream: torch.cuda.Stream) -> Tensor:
    tensor.record_stream(stream)
    return tensor


def _indexed(device: torch.device) -> torch.device:
    """The device with its index: ``cuda`` means the caller's current device, which differs in the background thread."""
    is_bare = device.type == "cuda" and device.index is None
    return torch.device("cuda", torch.cuda.current_device()) if is_bare else device
