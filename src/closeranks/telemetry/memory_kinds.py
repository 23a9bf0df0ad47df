"""How much memory do tensors take, by kind? Counted by the memory that they lie in, each piece of it once.

A parameter may be a view of a bucket, and a tied weight has two names: what counts is the storage, with its padding,
for the first kind that names it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor


class StorageBytes:
    """``add`` returns the bytes of those storages on the device that were not added before."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seen: set[int] = set()

    def add(self, tensors: Iterable[Tensor]) -> int:
        added = 0
        for tensor in tensors:
            to_local: Callable[[], Tensor] | None = getattr(tensor, "to_local", None)
            local = to_local() if to_local is not None else tensor
            if local.device.type != self._device.type:
                continue
            storage = local.untyped_storage()
            if storage.data_ptr() not in self._seen:
                self._seen.add(storage.data_ptr())
                added += storage.nbytes()
        return added


def with_activations(kinds: Mapping[str, int], allocated_bytes: int, peak_bytes: int) -> dict[str, int]:
    """Adds what torch's allocator knows of an accelerator. ``allocated_bytes``: when nothing but the state lived: what
    is not state was workspace. The peak was reached with activations on top; as gradients are not complete before the
    activations are freed, those may have been larger."""
    state_bytes = sum(kinds.get(kind, 0) for kind in ("parameters", "gradients", "optimizer", "buffers"))
    workspace = max(0, allocated_bytes - state_bytes)
    return {**kinds, "workspace": workspace, "activations": max(0, peak_bytes - state_bytes - workspace)}
