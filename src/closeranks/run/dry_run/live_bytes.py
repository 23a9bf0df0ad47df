"""How many bytes of tensors live on a device, now and at most?

Invariant: every storage counts once, from the operation that made it until it is freed, by the size that it has then.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

FAKE = "meta"
"""Where the storages of tensors without data are, on whatever device the tensors pretend to be."""


class LiveBytes(TorchDispatchMode):
    """Counts bytes while it is entered. ``device``: of the storages.

    Storages made before it was entered count only once ``watch`` has been told of them. What an operation allocates and
    frees within itself is not seen. A storage that is resized (as FSDP frees gathered weights) counts by its new size.
    """

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.current = 0
        self.peak = 0
        self._device = device
        self._sizes: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._resize: Callable[..., Any] = torch.UntypedStorage.resize_

    def watch(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            for storage in _storages(tensor):
                self._see(storage)

    def rest(self) -> None:
        """Measure the peak anew, from what lives now."""
        self.peak = self.current

    def __enter__(self) -> LiveBytes:
        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = self._resize(storage, size)
            if storage._cdata in self._sizes:
                self._see(storage)
            return result

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign,assignment]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *failure: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*failure)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.watch(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        if storage.device.type != self._device:
            return
        key, size = storage._cdata, storage.nbytes()
        known = self._sizes.get(key)
        if known is None:
            self._sizes[key] = (weakref.ref(storage, lambda _: self._forget(key)), size)
        else:
            self._sizes[key] = (known[0], size)
        self.current += size - (known[1] if known else 0)
        self.peak = max(self.peak, self.current)

    def _forget(self, key: int) -> None:
        _, size = self._sizes.pop(key)
        self.current -= size


def _storages(tensor: Any) -> Iterator[torch.UntypedStorage]:
    """Of the tensor, or of those that a wrapper (a DTensor, say) holds."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        for inner in (getattr(tensor, name) for name in names):
            if isinstance(inner, Tensor):  # a DTensor names its mesh too
                yield from _storages(inner)
    else:
        yield tensor.untyped_storage()
