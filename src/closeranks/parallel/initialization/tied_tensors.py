"""Finds tied tensors (several names for one tensor), and keeps them tied when a module's tensors are replaced.

torch replaces tensors name by name, which breaks ties. Invariant: names that were one tensor before are one after.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers under all of their names, parameters first."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def tied_names(module: nn.Module) -> list[tuple[str, str]]:
    """(first name, other name) of every tied tensor."""
    first: dict[int, str] = {}
    found = [(first.setdefault(id(tensor), name), name) for name, tensor in named_tensors(module)]
    return [(name, other) for name, other in found if name != other]


def replace_tensors(module: nn.Module, change: Callable[[], object]) -> None:
    """Let ``change`` replace the module's tensors, then restore the ties."""
    tied = tied_names(module)
    change()
    now = dict(named_tensors(module))
    for name, other in tied:
        _put(module, other, now[name])


def to_meta(module: nn.Module) -> None:
    """Drop the data of every parameter and buffer; shapes, dtypes, strides and ties stay."""
    made: dict[int, Tensor] = {}
    for name, tensor in list(named_tensors(module)):
        if id(tensor) not in made:
            empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            is_parameter = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
        _put(module, name, made[id(tensor)])


def _put(module: nn.Module, name: str, tensor: Tensor) -> None:
    owner, _, attribute = name.rpartition(".")
    setattr(module.get_submodule(owner), attribute, tensor)


def shared_storage(module: nn.Module) -> tuple[str, str] | None:
    """Two names of different tensors that share memory, such as a matrix and its transpose: once they are moved or
    sharded, nothing would keep them equal."""
    first: dict[int, tuple[str, int]] = {}
    for name, tensor in named_tensors(module):
        if tensor.numel() == 0:
            continue
        other, identity = first.setdefault(tensor.untyped_storage()._cdata, (name, id(tensor)))
        if identity != id(tensor):
            return other, name
    return None
