"""How is the whole state tree kept in one file?

A safetensors file: tensors under their path in the tree, everything else as JSON in its header, a CRC32C of each tensor
beside it. Nothing is pickled. Invariants: the file appears under its name complete or not at all (write, fsync, rename,
fsync of the folder); a damaged, torn or foreign file is refused by name, never loaded in part.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import crc32c
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from closeranks.core.errors import CheckpointError, SetupError

FILE_NAME = "state.safetensors"
_FORMAT = "closeranks-state-1"

Tree = Mapping[str, Any]


def save_tree(tree: Tree, path: Path) -> int:
    """Write the tree; returns its size in bytes."""
    tensors = {name: tensor.detach().to("cpu").contiguous() for name, tensor in _tensors(tree)}
    skeleton = json.dumps(_skeleton(tree))
    header = {
        "format": _FORMAT,
        "tree": skeleton,
        "tree_crc32c": str(crc32c.crc32c(skeleton.encode())),
        "crc32c": json.dumps({name: _digest(tensor) for name, tensor in tensors.items()}),
    }
    data = save(tensors, metadata=header)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise _storage_error(error, path, len(data)) from error
    return len(data)


def load_tree(path: Path) -> dict[str, Any]:
    """Read the tree back, every tensor checked against its digest."""
    if path.is_dir():
        path = path / FILE_NAME
    if not path.exists():
        raise CheckpointError(
            f"there is no state file at {path}", "Name a run folder or a state file of an earlier run."
        )
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            if header.get("format") != _FORMAT:
                raise CheckpointError(f"{path} is not a state file of this program", "Name one that a run saved.")
            if header["tree_crc32c"] != str(crc32c.crc32c(header["tree"].encode())):
                raise CheckpointError(f"{path} is damaged: its header does not match its digest", "Use an earlier one.")
            digests, skeleton = json.loads(header["crc32c"]), json.loads(header["tree"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except (SafetensorError, ValueError, KeyError, OSError) as error:
        raise CheckpointError(f"{path} is damaged or not a state file: {error}", "Use an earlier one.") from error
    for name, tensor in tensors.items():
        if digests.get(name) != _digest(tensor):
            raise CheckpointError(f"{path} is damaged: '{name}' does not match its digest", "Use an earlier one.")
    try:
        return _rebuild(skeleton, tensors, "")
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged: its parts do not fit together", "Use an earlier one.") from error


def _digest(tensor: Tensor) -> int:
    return crc32c.crc32c(tensor.reshape(-1).view(torch.uint8).numpy().data) if tensor.numel() else 0


def _tensors(tree: Tree, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    for key, value in tree.items():
        if isinstance(value, Tensor):
            yield f"{prefix}{key}", value
        elif isinstance(value, Mapping):
            yield from _tensors(value, f"{prefix}{key}/")


def _skeleton(tree: Tree) -> dict[str, Any]:
    """The tree without its tensors; ``{"tensor": true}`` marks where each one goes."""
    return {
        key: {"tensor": True}
        if isinstance(value, Tensor)
        else {"branch": _skeleton(value)}
        if isinstance(value, Mapping)
        else {"value": value}
        for key, value in tree.items()
    }


def _rebuild(skeleton: Mapping[str, Any], tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, entry in skeleton.items():
        if "tensor" in entry:
            tree[key] = tensors[f"{prefix}{key}"]
        elif "branch" in entry:
            tree[key] = _rebuild(entry["branch"], tensors, f"{prefix}{key}/")
        else:
            tree[key] = entry["value"]
    return tree


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _storage_error(error: OSError, path: Path, num_bytes: int) -> SetupError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        need = f"{num_bytes / 2**20:.0f} MiB are needed"
        return SetupError(
            f"the disk is full: the state could not be saved to {path} ({need})",
            "Free space or choose another run.folder.",
        )
    return SetupError(
        f"the state could not be saved to {path}: {error.strerror}", "Choose a run.folder you can write to."
    )
