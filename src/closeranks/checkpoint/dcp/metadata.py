"""Reads the pickled ``.metadata`` of a torch DCP folder without executing anything it names.

A pickle is a program that names classes and functions to call. Here every name is looked up in an allow-list of what
the metadata of torch 2.4 to 2.13 needs, and each is replaced by an inert record that stores its arguments; any other
name is refused before anything happens. Not even the allowed classes are used: a pickle may also set attributes, even
of a class, and such changes would persist in this process. Record classes are created anew for each file. Invariant:
reading a hostile file calls nothing but the constructors of records, and changes nothing that outlives it. Imports no
torch.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

from closeranks.core.errors import CheckpointError

DTYPES = frozenset(
    (
        *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
    )
)
_METADATA = "torch.distributed.checkpoint.metadata"
ALLOWED = (
    *((_METADATA, name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")),
    *((_METADATA, name) for name in ("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata")),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    # The path of the folder when it was saved.
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("pathlib._local", "PosixPath"),
    ("pathlib._local", "WindowsPath"),
    # Some Python versions pickle an enum member as getattr(class, name). Here it is a record of the two.
    ("builtins", "getattr"),
)


class PickledRecord:
    """An inert stand-in for a pickled object: the arguments and state it was made of."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state

    @property
    def kind(self) -> str:
        return type(self).__name__

    def get(self, key: str, default: Any = None) -> Any:
        """A field, or ``default`` if it is missing, for example because an earlier torch did not write it."""
        state = self.__dict__.get("state", {})
        return state.get(key, default) if isinstance(state, dict) else default


def read_metadata(data: bytes, name: str) -> PickledRecord:
    """The record of the ``Metadata`` object; ``name``: of the file, for errors."""
    try:
        found = _Unpickler(data, name).load()
    except CheckpointError:
        raise
    except Exception as error:  # what a damaged pickle may raise is not documented
        what = f"{name} is damaged: it is not torch DCP metadata ({type(error).__name__})"
        raise CheckpointError(what, "Copy the folder again from where it was saved.") from error
    if not isinstance(found, PickledRecord) or found.kind != "Metadata":
        raise CheckpointError(f"{name} is not torch DCP metadata", "Name a folder that dcp.save wrote.")
    return found


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, name: str) -> None:
        super().__init__(io.BytesIO(data))
        self._name = name
        self._known: dict[tuple[str, str], Any] = {one: type(one[1], (PickledRecord,), {}) for one in ALLOWED}
        self._known.update({("torch", dtype): dtype for dtype in DTYPES})

    def find_class(self, module: str, name: str) -> Any:
        known = self._known.get((module, name))
        if known is None:
            what = f"{self._name} asks for '{module}.{name}', which torch DCP metadata never needs: it was not executed"
            raise CheckpointError(what, "Do not load this folder anywhere else unless you trust who made it.")
        return known

    def persistent_load(self, pid: Any) -> Any:
        raise CheckpointError(f"{self._name} refers to something outside: it was not executed", "Do not trust it.")
