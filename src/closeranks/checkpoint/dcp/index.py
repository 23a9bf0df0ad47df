"""The index of a torch DCP folder: its tensors and values, and where they lie in its files.

Invariants: everything has the expected type; every file is in the same folder as the metadata; the chunks of a tensor
lie within it and have as many elements together as it has. Anything else is refused with an error that names it.
Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from closeranks.checkpoint.dcp.metadata import DTYPES, PickledRecord
from closeranks.checkpoint.dcp.names import StatePath
from closeranks.core.errors import CheckpointError
from closeranks.core.pieces import Piece


@dataclass(frozen=True, slots=True)
class DcpFileRange:
    """A byte range of a file: what ``torch.save`` wrote for one chunk or one value."""

    file: str
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class DcpTensor:
    """A tensor and its chunks."""

    name: str
    path: StatePath
    """Its path in the state dict that was saved; only the name if the path was not recorded."""
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[tuple[Piece, DcpFileRange], ...]
    """None of them empty."""


@dataclass(frozen=True, slots=True)
class DcpIndex:
    tensors: Mapping[str, DcpTensor]
    values: Mapping[str, DcpFileRange]
    """Non-tensor values by name: pickled, and never unpickled here."""


class _BadIndex(Exception):
    pass


def parse_index(metadata: PickledRecord, name: str) -> DcpIndex:
    """``name``: of the metadata file, for errors."""
    try:
        return _index(metadata)
    except _BadIndex as error:
        what = f"{name} is damaged or invalid: {error}"
        raise CheckpointError(what, "Copy the folder again from where it was saved.") from None


def _index(metadata: PickledRecord) -> DcpIndex:
    slots = _slots(_of(dict, metadata.get("storage_data"), "storage data"))
    paths = metadata.get("planner_data")
    paths = paths if isinstance(paths, dict) else {}
    tensors: dict[str, DcpTensor] = {}
    values: dict[str, DcpFileRange] = {}
    for name, row in _of(dict, metadata.get("state_dict_metadata"), "list of names").items():
        what = _of(str, name, "name")
        record = _of(PickledRecord, row, f"entry of '{what}'")
        if record.kind == "TensorStorageMetadata":
            tensors[what] = _stored(what, record, _path(paths.get(what), what), slots)
        elif record.kind == "BytesStorageMetadata":
            values[what] = _slot(slots, what, None)
        else:
            raise _BadIndex(f"'{what}' is neither a tensor nor a value")
    return DcpIndex(tensors, values)


def _slots(rows: dict[Any, Any]) -> dict[tuple[str, tuple[int, ...] | None], DcpFileRange]:
    found: dict[tuple[str, tuple[int, ...] | None], DcpFileRange] = {}
    for key, row in rows.items():
        index, info = _of(PickledRecord, key, "index"), _of(PickledRecord, row, "place in a file")
        name, offset = _of(str, index.get("fqn"), "name"), index.get("offset")
        file = _of(str, info.get("relative_path"), "file name")
        if "/" in file or "\\" in file or file in ("", ".", ".."):
            raise _BadIndex(f"'{name}' is listed in '{file}', which is not a file beside the metadata")
        if info.get("transform_descriptors"):
            raise _BadIndex(f"'{name}' was saved through an extension ({info.get('transform_descriptors')})")
        slot = DcpFileRange(file, _count(info.get("offset"), "offset"), _count(info.get("length"), "length"))
        if found.setdefault((name, None if offset is None else _size(offset)), slot) != slot:
            raise _BadIndex(f"'{name}' is listed in two places")
    return found


def _slot(slots: Mapping[Any, DcpFileRange], name: str, offset: tuple[int, ...] | None) -> DcpFileRange:
    slot = slots.get((name, offset))
    if slot is None:
        raise _BadIndex(f"the metadata does not say where '{name}' lies")
    return slot


def _stored(name: str, record: PickledRecord, path: StatePath, slots: Mapping[Any, DcpFileRange]) -> DcpTensor:
    properties = _of(PickledRecord, record.get("properties"), f"type of '{name}'")
    state = properties.__dict__.get("state")
    dtype = state[0] if isinstance(state, tuple) and state else None
    if dtype not in DTYPES:
        raise _BadIndex(f"the type of '{name}' is not known")
    shape = _size(record.get("size"))
    chunks = []
    for row in _of(list, record.get("chunks"), f"chunks of '{name}'"):
        chunk = _of(PickledRecord, row, f"chunk of '{name}'")
        start, size = _size(chunk.get("offsets")), _size(chunk.get("sizes"))
        if len(start) != len(shape) or len(size) != len(shape):
            raise _BadIndex(f"a chunk of '{name}' has a different number of dims")
        if any(begin + extent > whole for begin, extent, whole in zip(start, size, shape, strict=True)):
            raise _BadIndex(f"a chunk of '{name}' reaches out of bounds")
        if prod(size):
            chunks.append((Piece(name, shape, start, size), _slot(slots, name, start)))
    if sum(piece.numel for piece, _ in chunks) != prod(shape):
        raise _BadIndex(f"the chunks of '{name}' do not add up to it")
    return DcpTensor(name, path, dtype, shape, tuple(chunks))


def _path(value: Any, name: str) -> StatePath:
    if isinstance(value, tuple) and value and all(isinstance(one, str | int) for one in value):
        return value
    return (name,)


def _size(value: Any) -> tuple[int, ...]:
    """The dims of a ``torch.Size``, which is a record of one tuple."""
    record = _of(PickledRecord, value, "size")
    arguments = record.__dict__.get("arguments", ())
    inner = arguments[0] if record.kind == "Size" and len(arguments) == 1 else None
    return tuple(_count(one, "size") for one in _of(tuple, inner, "size"))


def _count(value: Any, what: str) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise _BadIndex(f"a {what} is not a number of elements or bytes")
    return value


def _of(kind: type[Any], value: Any, what: str) -> Any:
    if not isinstance(value, kind):
        raise _BadIndex(f"the {what} is of type {type(value).__name__}, not {kind.__name__}")
    return value
