"""The source of an export: what is read from a checkpoint or a set of weights to be written in another format.

Tensors under their names in the target state dict, each read lazily, piece by piece, and non-tensor values. Invariant:
nothing is read before it is requested.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor

from closeranks.checkpoint.dcp.names import Names, StatePath, TensorKey
from closeranks.checkpoint.dcp.tree import list_for_dcp
from closeranks.checkpoint.dcp.values import decode
from closeranks.checkpoint.load.resharding_reader import CheckpointReader
from closeranks.checkpoint.weights.protocol import Weights
from closeranks.core.pieces import Piece


@dataclass(frozen=True, slots=True, eq=False)
class LazyTensor:
    """A tensor that is read on request."""

    name: str
    path: StatePath
    """Its path in the nested state dict."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[Piece], Tensor]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class ExportSource:
    tensors: tuple[LazyTensor, ...]
    values: Mapping[str, Any] = field(default_factory=dict)
    """Non-tensor values by name, unchanged."""
    paths: Mapping[str, StatePath] = field(default_factory=dict)
    """Paths of the values in the nested state dict."""

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors)


def source_from_weights(weights: Weights, names: Names) -> ExportSource:
    """A model's weights, at the model's path in a state dict."""

    def lazy_tensor(key: str, shape: tuple[int, ...]) -> LazyTensor:
        tensor_key = TensorKey("model", key)
        name, path = names.name(tensor_key), names.path(tensor_key)
        assert name is not None
        assert path is not None
        return LazyTensor(name, path, tuple(shape), weights.dtype(key), lambda piece: weights.read(key, piece))

    return ExportSource(tuple(lazy_tensor(key, shape) for key, shape in weights.names().items()))


def source_from_checkpoint(reader: CheckpointReader) -> ExportSource:
    """Everything of a checkpoint that a DCP state dict can hold: model, optimizer, other tensors, values."""
    listed = list_for_dcp(reader.manifest, None)
    shapes = {
        section: reader.shapes(section) for section in {tensor_key.section for tensor_key in listed.tensors.values()}
    }

    def lazy_tensor(name: str, tensor_key: TensorKey) -> LazyTensor:
        section, key = tensor_key.section, tensor_key.key
        dtype = reader.dtype(section, key)
        return LazyTensor(
            name, listed.paths[name], shapes[section][key], dtype, lambda piece: reader.read(section, key, piece)
        )

    tensors = tuple(lazy_tensor(name, tensor_key) for name, tensor_key in listed.tensors.items())
    values = {name: decode(value) for name, value in listed.values.items()}
    return ExportSource(tensors, values, {name: listed.paths.get(name, (name,)) for name in values})
