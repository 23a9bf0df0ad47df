"""Reads the weights of a Hugging Face folder.

One ``model.safetensors``, or several files with ``model.safetensors.index.json``; a single .safetensors file of any
name is read in the same way. Invariant: index and files agree; if they differ, nothing is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from closeranks.checkpoint.weights.hf_index import read_index
from closeranks.checkpoint.weights.safetensors_file import SafetensorsFile
from closeranks.core.errors import CheckpointError
from closeranks.core.pieces import Piece

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class SafetensorsFolder:
    """Tensors of one or several safetensors files (``protocol.Weights``)."""

    notes: tuple[str, ...] = ()

    def __init__(self, path: str, files: Mapping[str, SafetensorsFile]) -> None:
        self.path = path
        self._files = files
        """The file of each tensor."""

    def names(self) -> dict[str, tuple[int, ...]]:
        return {name: file.tensors[name].shape for name, file in self._files.items()}

    def dtype(self, name: str) -> torch.dtype:
        return self._files[name].tensors[name].dtype

    def read(self, name: str, piece: Piece, dtype: torch.dtype | None = None) -> Tensor:
        return self._files[name].read(name, piece, dtype)


def open_safetensors(place: Path) -> SafetensorsFolder:
    """A file, or a folder that holds ``model.safetensors`` or its index."""
    if place.is_dir() and not (place / SINGLE).is_file():
        return SafetensorsFolder(str(place), _indexed(place / INDEX))
    single = SafetensorsFile(place / SINGLE if place.is_dir() else place)
    return SafetensorsFolder(str(place), dict.fromkeys(single.tensors, single))


def _indexed(index: Path) -> dict[str, SafetensorsFile]:
    where = read_index(index)
    opened = {path: SafetensorsFile(path) for path in dict.fromkeys(where.values())}
    for name, path in where.items():
        if name not in opened[path].tensors:
            what = f"{index} looks for '{name}' in {path.name}, which does not hold it"
            raise CheckpointError(what, "Fetch the folder again.")
    for path, file in opened.items():
        odd = next((name for name in file.tensors if where.get(name) != path), None)
        if odd is not None:
            raise CheckpointError(f"{path} holds '{odd}', which {index.name} does not say", "Fetch the folder again.")
    return {name: opened[path] for name, path in where.items()}
