"""Turns stored records into samples: selects and renames fields and makes tensors of them.

A batch is one read of the store, decoded together, then either stacked field by field or passed to the user's own
function. Invariant: the fields are fixed when the data is opened, from its first records; a record that differs is a
``BadRecordError`` which names the sample, its location and what was expected.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt
from torch import Tensor

from closeranks.core.errors import BadRecordError, CloseranksError, DataError, UserError
from closeranks.core.protocols import Batch
from closeranks.core.registry import load_object
from closeranks.data.config import RecordsConfig
from closeranks.data.dataset_protocol import Ints, Record, Records, select_fields
from closeranks.data.decode import decode_batch, is_image
from closeranks.data.files.protocol import Files
from closeranks.data.formats.open import open_records
from closeranks.data.sources.collate import (
    CollatedField,
    Columns,
    Decoded,
    FieldMismatch,
    infer_fields,
    is_equal_tensor,
    is_inside,
    stack,
)
from closeranks.data.sources.registry import SOURCES, Split
from closeranks.data.sources.sample_errors import name_some_samples, sample_error
from closeranks.data.sources.splits import close, files_of, index_location, name_of, samples_of
from closeranks.data.sources.tensors import tensor_dtype, to_tensor
from closeranks.data.timing import stage

ReadColumns: TypeAlias = Callable[[Ints, Collection[str]], Mapping[str, npt.NDArray[Any]] | None]
_PROBED = 8
"""Number of records from which the fields are inferred."""


@dataclass(frozen=True, slots=True)
class RecordSelection:
    """What a job uses of each record."""

    fields: Mapping[str, str]
    """Name in the batch -> name in the record; empty: all."""
    image_size: int = 0
    transform: str = ""


@dataclass(frozen=True, slots=True)
class InferredFields:
    """What the first records determine for all."""

    columns: Columns
    """The tensors of a batch; empty if the user's function makes them."""
    fields: Mapping[str, str]
    """The fields to decode, as in ``RecordSelection``; if the job names none, those that become tensors."""
    is_plain: bool = False
    """Decoding would change nothing and is skipped: it costs more than reading."""


class RecordsSource:
    """Sample i is record i."""

    def __init__(self, store: Records, files: Files, selection: RecordSelection, samples: range, identity: str) -> None:
        self.identity = identity
        self.block = store.block
        self._store, self._files = store, files
        self._selection = selection
        self._samples = samples
        self._inferred = (
            InferredFields({}, selection.fields) if selection.transform else _infer(store, selection, identity)
        )
        is_stacked = self._inferred.is_plain and self._inferred.columns.keys() == self._inferred.fields.keys()
        self._columns: ReadColumns | None = getattr(store, "columns", None) if is_stacked else None
        """For stores that can read fields of many records at once."""
        if selection.transform:
            _transform(selection.transform)

    def __len__(self) -> int:
        return len(self._samples)

    def read(self, indices: Ints) -> Batch:
        if self._columns is not None and (batch := self._together(indices, self._columns)) is not None:
            return batch
        decoded = self._decoded(self._store.read(self._numbers(indices)), indices)
        with stage("collate"):
            return self._transformed(decoded, indices) if self._selection.transform else self._stacked(decoded, indices)

    def _together(self, indices: Ints, read: ReadColumns) -> Batch | None:
        """The whole batch field by field; None if some of its records do not fit the fields."""
        fields = self._inferred.fields
        found = read(self._numbers(indices), fields.values())
        if found is None:
            return None
        with stage("collate"):
            batch: dict[str, Tensor] = {}
            for name, field in self._inferred.columns.items():
                column = found[fields[name]]
                if column.shape[1:] != field.shape or tensor_dtype(column.dtype) != field.dtype:
                    return None
                batch[name] = to_tensor(column)
            return batch

    def where(self, index: int) -> str:
        return str(self._store.where(self._samples.start + index))

    def prefetch(self, indices: Ints) -> None:
        if not self._files.is_local:
            self._files.prefetch(self._store.files_of(self._numbers(indices)))

    def close(self) -> None:
        close(self._store, self._files)

    def _numbers(self, indices: Ints) -> Ints:
        return np.asarray(indices, dtype=np.int64) + self._samples.start

    def _decoded(self, records: Sequence[Record], indices: Ints) -> Sequence[Decoded]:
        fields = self._inferred.fields
        if self._inferred.is_plain:
            return [{name: record.get(source) for name, source in fields.items()} for record in records]
        return decode_batch(
            records, self._selection.image_size, fields, where=lambda row: self.where(int(indices[row]))
        )

    def _stacked(self, decoded: Sequence[Decoded], indices: Ints) -> Batch:
        batch: dict[str, Tensor] = {}
        for name, field in self._inferred.columns.items():
            try:
                batch[name] = stack(field, [record.get(name) for record in decoded])
            except FieldMismatch as error:
                index = int(indices[error.row])
                what = f"sample {index} of {self.identity} ({self.where(index)}): '{name}' {error}"
                raise BadRecordError(what, _advice(field)) from None
        return batch

    def _transformed(self, decoded: Sequence[Decoded], indices: Ints) -> Batch:
        try:
            return _transform(self._selection.transform)(decoded)
        except CloseranksError:
            raise
        except Exception as error:
            location = f" ({self.where(int(indices[0]))})" if len(indices) == 1 else ""
            samples = name_some_samples(indices.tolist())
            named = f"data.transform = '{self._selection.transform}' for {samples}{location}"
            raise sample_error(named, error, "Fix the function, or the record.") from error


def _advice(field: CollatedField) -> str:
    if field.is_image:
        return "Set data.image_size, which gives all images one size, or fix the record."
    return "Give the values one shape and dtype in data.transform, or fix the record."


@cache
def _transform(path: str) -> Callable[[Sequence[Decoded]], Batch]:
    """Loaded where it is called, so that a source can be sent to a worker whatever the function is."""
    function = load_object(path, place="data.transform")
    if not callable(function):
        raise UserError(f"data.transform = '{path}' cannot be called", "Name a function.")
    return cast(Callable[[Sequence[Decoded]], Batch], function)


def _infer(store: Records, selection: RecordSelection, identity: str) -> InferredFields:
    """From the first records that can be read."""
    records, decoded = _probe(store, selection, identity)
    pairs = list(zip(records, decoded, strict=True))
    names = {name: selection.fields.get(name, name) for values in decoded for name in values}
    images = {name for name, source in names.items() if any(is_image(source, record.get(source)) for record in records)}
    columns = infer_fields(decoded, images, identity, is_asked_for=bool(selection.fields))
    stored = dict.fromkeys(name for record in records for name in record)
    fields = selection.fields or {name: name for name in stored if any(is_inside(column, name) for column in columns)}
    is_plain = all(
        is_equal_tensor(record.get(names[name]), values.get(name)) for name in columns for record, values in pairs
    )
    return InferredFields(columns, fields, is_plain)


def _probe(store: Records, selection: RecordSelection, identity: str) -> tuple[list[Record], list[Decoded]]:
    records: list[Record] = []
    decoded: list[Decoded] = []
    bad = None
    for number in range(min(_PROBED, len(store))):
        try:
            record = store.read(np.array([number], dtype=np.int64))[0]
            decoded += decode_batch(
                [record], selection.image_size, selection.fields, where=partial(_location, store, number)
            )
            records.append(record)
        except BadRecordError as error:
            bad = error
    if not decoded:
        what = f"none of the first records of {identity} can be used; the last: {bad}"
        raise DataError(what, "Fix the data, or say in data.fields which fields it has.")
    return records, decoded


def _location(store: Records, number: int, _: int) -> str:
    return str(store.where(number))


@SOURCES.register("records")
def open_records_source(config: RecordsConfig, split: Split, seed: int) -> RecordsSource | None:
    files = files_of(config, split)
    if files is None:
        return None
    store = select_fields(open_records(files, config.format, index_location(config)), config.fields.values())
    name = name_of(config, files)
    if len(store) == 0:
        raise DataError(f"{name} holds no records", "Give it at least one.")
    samples = samples_of(config, split, len(store), name)
    selection = RecordSelection(config.fields, config.image_size, config.transform)
    identity = f"{name} ({split}, samples {samples.start}:{samples.stop}, {store.identity})"
    return RecordsSource(store, files, selection, samples, identity)
