"""Reads fields of many records at once, without decoding the records one by one.

Records of one schema whose values have equal sizes hold each field at the same offset, so one gather reads a field of
all of them. Invariant: the result equals what ``encoding.RecordDecoder`` returns for each record, stacked; if the
records differ in size the result is None, and the caller reads them one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from closeranks.data.dataset_protocol import Ints
from closeranks.data.shards.encoding import RecordSchema

Gather: TypeAlias = Callable[[Ints, int, np.dtype[Any]], npt.NDArray[Any]]
"""(positions, number of bytes, dtype) -> one row for each position."""

_WORD = np.dtype("<i8")
_NUMBERS = {"int": _WORD, "float": np.dtype("<f8"), "bool": _WORD}


class SchemaColumns:
    """Fields of records of one schema."""

    __slots__ = ("_fields", "_head_bytes", "_sizes")

    def __init__(self, schema: RecordSchema) -> None:
        word = 1
        sizes: list[int] = []
        self._fields: list[tuple[str, str, np.dtype[Any], int, int]] = []
        for field in schema:
            dtype = np.dtype(field.dtype).newbyteorder("<") if field.dtype else _NUMBERS.get(field.kind, np.dtype("u1"))
            self._fields.append((field.name, field.kind, dtype, word, field.ndim))
            if field.kind not in _NUMBERS:
                sizes += range(word, word + len(field.struct_codes))
            word += len(field.struct_codes)
        self._head_bytes = 8 * word
        self._sizes = np.array(sizes, dtype=np.int64)

    def read(self, gather: Gather, at: Ints, names: Collection[str]) -> dict[str, npt.NDArray[Any]] | None:
        """The named fields of the records at these positions. The records must have equal length, and the first must be
        known to be sound. None if their values have other sizes, or are not numbers."""
        heads = gather(at, self._head_bytes, _WORD)
        if np.count_nonzero(heads[:, self._sizes] != heads[0, self._sizes]):
            return None
        first = heads[0].tolist()
        found: dict[str, npt.NDArray[Any]] = {}
        end = self._head_bytes
        for name, kind, dtype, word, ndim in self._fields:
            if kind in _NUMBERS:
                if name in names:
                    column = np.ascontiguousarray(heads[:, word])
                    found[name] = column != 0 if kind == "bool" else column.view(dtype)
                continue
            if kind == "none":
                continue
            begin = (end + 7) & ~7 if kind == "array" else end
            end = first[word + ndim]
            if name in names and kind in ("array", "bytes") and end > begin:
                rows = gather(at + begin, end - begin, dtype)
                found[name] = rows.reshape(len(at), *first[word : word + ndim]) if kind == "array" else rows
        return found if len(found) == len(names) else None
