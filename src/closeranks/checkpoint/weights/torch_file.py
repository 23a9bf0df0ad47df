"""Reads weights from a ``torch.save`` file.

The file is a zip of a pickle and raw storages. Invariants: the pickle goes through torch's ``weights_only`` unpickler,
which accepts tensors and plain containers and executes nothing; every record's checksum is checked before a value is
used (``torch.load`` does not check it); storages are mapped, so that a rank reads only what its pieces touch.
"""

from __future__ import annotations

import pickle
import re
import warnings
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from closeranks.checkpoint.weights.hf_index import read_index
from closeranks.core.errors import CheckpointError
from closeranks.core.pieces import Piece, narrow_to_piece
from closeranks.core.system.regular_file import open_binary

SINGLE, INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
NESTED = ("model", "state_dict", "module", "model_state_dict", "weights")
"""Keys under which programs store the weights beside other things, in search order."""
WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""What ``torch.compile``, FSDP and activation checkpointing insert between module names."""
_PARALLEL = "module."
"""The prefix that data-parallel wrappers add to all names. Elsewhere in a name it may be the user's own module."""
_READ_BYTES = 4 << 20


class TorchFile:
    """Tensors of ``torch.save`` files (``protocol.Weights``)."""

    def __init__(self, path: str, tensors: Mapping[str, Tensor], notes: tuple[str, ...]) -> None:
        self.path = path
        self.notes = notes
        self._tensors = tensors

    def names(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[name].dtype

    def read(self, name: str, piece: Piece, dtype: torch.dtype | None = None) -> Tensor:
        part = narrow_to_piece(self._tensors[name].detach(), piece)
        return torch.empty(piece.local_shape, dtype=dtype or part.dtype).copy_(part)


def open_torch(place: Path) -> TorchFile:
    """A file, or a folder that holds ``pytorch_model.bin`` or its index."""
    if place.is_dir() and not (place / SINGLE).is_file():
        files = list(dict.fromkeys(read_index(place / INDEX).values()))
    else:
        files = [place / SINGLE if place.is_dir() else place]
    found: dict[str, Tensor] = {}
    notes: list[str] = []
    for file in files:
        if not check_records(file):
            notes.append(f"{file} was saved without checksums: damage within it would not be detected.")
        tensors, where = _state_dict(file, load_plain(file))
        notes += [f"The weights of {file} were found under '{where}'."] if where else []
        found |= tensors
    plain = plain_names(found)
    if len(set(plain.values())) < len(plain):
        raise CheckpointError(f"{place} has duplicate tensor names, under different wrappers", "Save one of them.")
    odd = next((name for name in plain if plain[name] != name), None)
    if odd is not None:
        notes.append(f"Names of {place} were read without their wrapper prefixes: '{odd}' as '{plain[odd]}'.")
    return TorchFile(str(place), {plain[name]: tensor for name, tensor in found.items()}, tuple(notes))


def plain_names(names: Iterable[str]) -> dict[str, str]:
    """Each name without the wrappers that a program put around its modules."""
    plain = {name: ".".join(part for part in name.split(".") if part not in WRAPPERS) or name for name in names}
    while plain and all(name.startswith(_PARALLEL) and name != _PARALLEL for name in plain.values()):
        plain = {name: short.removeprefix(_PARALLEL) for name, short in plain.items()}
    return plain


def load_plain(path: Path) -> Any:
    """The contents of a file, with tensors mapped; ``CheckpointError`` with one sentence if it is damaged or would
    need to execute code."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about deprecated storages and formats; real problems raise
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL ([\w.]+)|class ([\w.]+)", str(error))
        needs = f" ('{named[1] or named[2]}')" if named else ""
        what = f"{path} holds more than tensors and plain values{needs}, and nothing in it was executed"
        raise CheckpointError(what, "Save the weights alone: torch.save(model.state_dict(), path).") from error
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError(f"{path} is damaged: torch cannot read it", "Fetch or save it again.") from error


def check_records(path: Path) -> bool:
    """Compare every record of the zip with its checksum; reads the file once, in parts. False if its writer was
    configured to omit them (``torch.serialization.set_crc32_options``)."""
    try:
        with open_binary(path) as whole:
            if not zipfile.is_zipfile(whole):
                raise CheckpointError(_no_zip(path), "Save the weights again with torch.save of a current PyTorch.")
        with open_binary(path) as whole, zipfile.ZipFile(whole) as archive:
            records = archive.infolist()
            if not any(record.CRC for record in records):
                return False
            for record in records:
                if record.compress_type != zipfile.ZIP_STORED:
                    raise CheckpointError(f"{path} is not a torch.save file: it is compressed", "Save it again.")
                with archive.open(record) as file:
                    while file.read(_READ_BYTES):
                        pass
    except (zipfile.BadZipFile, EOFError, NotImplementedError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: a checksum does not match", "Fetch or save it again.") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}", "Check the file.") from error
    return True


def _no_zip(path: Path) -> str:
    with open_binary(path) as file:
        is_pickle = file.read(1) == b"\x80"
    if is_pickle:
        return f"{path} is in the format torch used before 1.6, or a plain pickle, which can only be read whole"
    return f"{path} is damaged, or not a torch.save file"


def _state_dict(path: Path, value: Any) -> tuple[dict[str, Tensor], str]:
    """The tensors of a file, and the key they were found under."""
    where = ""
    if isinstance(value, Mapping):  # nested dicts first: tensors beside them may not be weights (a step counter)
        where = next((key for key in NESTED if isinstance(value.get(key), Mapping) and _tensors(value[key])), "")
        value = value[where] if where else value
    tensors = _tensors(value) if isinstance(value, Mapping) else {}
    if not tensors:
        what = f"{path} holds no weights: neither tensors by name, nor under {', '.join(NESTED[:-1])} or {NESTED[-1]}"
        raise CheckpointError(what, "Save the weights alone: torch.save(model.state_dict(), path).")
    _refuse_odd(path, tensors.items())
    return tensors, where


def _tensors(value: Mapping[Any, Any]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in value.items() if isinstance(name, str) and isinstance(tensor, Tensor)}


def _refuse_odd(path: Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
    for name, tensor in tensors:
        is_plain = type(tensor) in (Tensor, nn.Parameter)  # not a subclass that wraps others, such as DTensor
        if not is_plain or tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
            what = f"'{name}' in {path} is a sparse, quantised, distributed or empty (meta) tensor"
            raise CheckpointError(what, "Save dense weights.")
