"""How do tensors and what is said of them lie in one file?

A safetensors file: tensors under their names, one JSON document in its header, and a CRC32C of each beside them.
Nothing is pickled. Invariants: the file appears under its name complete or not at all (write, fsync, rename, fsync of
the folder); what is read has been checked against its digest, and damage is refused by name.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import crc32c
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from closeranks.core.errors import CheckpointError, SetupError

FILE_NAME = "state.safetensors"
"""Of a state that is kept whole."""


def write_file(path: Path, kind: str, document: Any, tensors: Mapping[str, Tensor]) -> int:
    """Write all of it; returns its size in bytes. Costs a second copy of the tensors in the host's memory."""
    held = {name: _as_saved(tensor) for name, tensor in tensors.items()}
    text = json.dumps(document)
    header = {
        "format": kind,
        "tree": text,
        "tree_crc32c": str(crc32c.crc32c(text.encode())),
        "crc32c": json.dumps({name: digest(tensor) for name, tensor in held.items()}),
    }
    data = save(held, metadata=header)
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
        with suppress(OSError):  # where the folder is none, there is nothing to clear
            temporary.unlink()
        raise _storage_error(error, path, len(data)) from error
    return len(data)


class StateFile:
    """A file that ``write_file`` wrote, open for reading; tensors come one at a time, and only when asked for."""

    def __init__(self, path: Path, kind: str) -> None:
        self.path = path
        self._sound: set[str] = set()
        try:
            self._file: Any = safe_open(path, framework="pt")
            header = self._header()
            if header.get("format") != kind:
                raise CheckpointError(f"{path} is not a state file of this program", "Name one that a run saved.")
            if header["tree_crc32c"] != str(crc32c.crc32c(header["tree"].encode())):
                raise CheckpointError(f"{path} is damaged: its header does not match its digest", "Use an earlier one.")
            self._digests: dict[str, int] = json.loads(header["crc32c"])
            self.document: Any = json.loads(header["tree"])
        except (SafetensorError, ValueError, KeyError, OSError) as error:
            raise CheckpointError(f"{path} is damaged or not a state file: {error}", "Use an earlier one.") from error

    def _header(self) -> dict[str, str]:
        return self._file.metadata() or {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._file.keys())

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file.get_slice(name).get_shape())

    def tensor(self, name: str) -> Tensor:
        """A tensor, checked against its digest when it is read first. Its memory is the file's own pages."""
        try:
            tensor: Tensor = self._file.get_tensor(name)
        except (SafetensorError, ValueError, OSError) as error:
            raise CheckpointError(f"{self.path} is damaged: '{name}' cannot be read", "Use an earlier one.") from error
        if name not in self._sound and self._digests.get(name) != digest(tensor):
            what = f"{self.path} is damaged: '{name}' does not match its digest"
            raise CheckpointError(what, "Use an earlier one.")
        self._sound.add(name)
        return tensor


def digest(tensor: Tensor) -> int:
    if not tensor.numel():
        return 0
    # A single element counts as contiguous whatever its stride, and cannot be seen as bytes with another than 1.
    flat = tensor.reshape(-1) if tensor.numel() > 1 else tensor.reshape(-1).clone(memory_format=torch.contiguous_format)
    return crc32c.crc32c(flat.as_strided((flat.numel(),), (1,)).view(torch.uint8).numpy().data)


def _as_saved(tensor: Tensor) -> Tensor:
    """On the CPU and contiguous. Numbers are copied: several names may share one, which the format refuses."""
    held = tensor.detach().to("cpu").contiguous()
    return held.clone() if held.ndim == 0 else held


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
