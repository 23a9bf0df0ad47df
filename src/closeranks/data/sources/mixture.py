"""Combines several sources into one: the samples of the first, then those of the second, and so on.

The order decides in which proportions they are drawn (it uses ``parts`` and ``weights``). Invariant: a sample is the
same in whichever batch it is read: all parts return the same tensors, with the same dtype and shape, which are
determined when the mixture is opened and then fixed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from closeranks.core.errors import BadRecordError, DataError
from closeranks.core.protocols import Batch
from closeranks.data.config import MixtureConfig
from closeranks.data.dataset_protocol import Ints
from closeranks.data.source import LoaderSource, as_loader_source
from closeranks.data.sources.registry import SOURCES, Split, opener_of

_PROBED = 8
"""Number of samples tried if the first ones of a part are damaged."""


@dataclass(frozen=True, slots=True)
class SampleTensorSpec:
    """The dtype and shape of one sample's row in one tensor of a batch."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


Fields: TypeAlias = Mapping[str, SampleTensorSpec]


@dataclass(frozen=True, slots=True)
class WeightedSource:
    name: str
    source: LoaderSource
    weight: float


class MixtureSource:
    """The concatenation of the parts: sample ids continue from part to part."""

    def __init__(self, parts: Sequence[WeightedSource]) -> None:
        self.parts: tuple[LoaderSource, ...] = tuple(part.source for part in parts)
        self.weights = tuple(part.weight for part in parts)
        self.vocab_size = max(int(getattr(source, "vocab_size", 0)) for source in self.parts)
        self.block = max(source.block for source in self.parts)
        named = ", ".join(f"{part.name} x {part.weight:g}: {part.source.identity}" for part in parts)
        self.identity = f"mixture of {named}"
        self._names = tuple(part.name for part in parts)
        self._bounds = np.cumsum([0, *(len(source) for source in self.parts)], dtype=np.int64)
        self._fields = common_fields({part.name: _fields(part) for part in parts})

    def __len__(self) -> int:
        return int(self._bounds[-1])

    def read(self, indices: Ints) -> Batch:
        """Each part is read once; rows are in the order of ``indices``."""
        numbers = self._numbers(indices)
        rows, batches = [], []
        for number in np.unique(numbers).tolist():
            here = np.flatnonzero(numbers == number)
            rows.append(here)
            batches.append(self._read_part(number, indices[here] - self._bounds[number]))
        if len(batches) == 1:
            return batches[0]
        places = torch.from_numpy(np.argsort(np.concatenate(rows)))
        return {name: torch.cat([batch[name] for batch in batches]).index_select(0, places) for name in self._fields}

    def _read_part(self, number: int, indices: Ints) -> Batch:
        batch = self.parts[number].read(indices)
        found = fields_of(batch)
        merged = {}
        for name, field in self._fields.items():
            if name not in found or found[name].shape != field.shape:
                got = f"'{name}' as {found[name]}" if name in found else f"no '{name}'"
                what = f"part '{self._names[number]}' of the mixture gave {got} where {field} was expected"
                raise DataError(what, "The samples of all parts must have the same shape.")
            merged[name] = batch[name].to(field.dtype)
        return merged

    def where(self, index: int) -> str:
        number = int(self._numbers(np.array([index]))[0])
        local = index - int(self._bounds[number])
        return ", ".join(filter(None, (f"sample {local} of {self._names[number]}", self.parts[number].where(local))))

    def prefetch(self, indices: Ints) -> None:
        numbers = self._numbers(indices)
        for number, part in enumerate(self.parts):
            part.prefetch(indices[numbers == number] - self._bounds[number])

    def close(self) -> None:
        for part in self.parts:
            part.close()

    def _numbers(self, indices: Ints) -> Ints:
        """The number of the part that contains each index."""
        return np.searchsorted(self._bounds, indices, side="right") - 1


def fields_of(batch: Batch) -> dict[str, SampleTensorSpec]:
    return {
        name: SampleTensorSpec(value.dtype, tuple(value.shape[1:]))
        for name, value in batch.items()
        if isinstance(value, Tensor)
    }


def common_fields(parts: Mapping[str, Fields]) -> dict[str, SampleTensorSpec]:
    """The fields of a mixture's batch. Integers of different sizes are widened; everything else must agree."""
    (first_name, first), *others = parts.items()
    for name, fields in others:
        if fields.keys() != first.keys():
            what = f"parts '{first_name}' and '{name}' of the mixture give different tensors: {_listed(first, fields)}"
            fix = "Give all parts the same fields, and all parts with tokens the same data.packing."
            raise DataError(what, fix)
        for key, field in fields.items():
            if field.shape != first[key].shape or not _can_widen(field.dtype, first[key].dtype):
                what = f"'{key}' is {first[key]} in part '{first_name}' of the mixture and {field} in part '{name}'"
                raise DataError(
                    what, "Samples must have one shape and type: the same data.seq_len, image_size, fields."
                )
    return {
        key: SampleTensorSpec(reduce(_widened, (fields[key].dtype for fields in parts.values())), field.shape)
        for key, field in first.items()
    }


def _listed(one: Fields, other: Fields) -> str:
    return f"{', '.join(sorted(one)) or 'none'} and {', '.join(sorted(other)) or 'none'}"


def _can_widen(one: torch.dtype, other: torch.dtype) -> bool:
    return one == other or (_is_integer(one) and _is_integer(other))


def _is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def _widened(one: torch.dtype, other: torch.dtype) -> torch.dtype:
    """By numpy's rules: torch does not promote uint16."""
    if one == other:
        return one
    dtypes = (torch.empty(0, dtype=dtype).numpy().dtype for dtype in (one, other))
    return torch.from_numpy(np.empty(0, dtype=np.result_type(*dtypes))).dtype


def _fields(part: WeightedSource) -> Fields:
    """The fields of a sample that can be read: reading one is the only way to know what a user's own source returns."""
    last: BadRecordError | None = None
    for index in range(min(_PROBED, len(part.source))):
        try:
            return fields_of(part.source.read(np.array([index], dtype=np.int64)))
        except BadRecordError as error:
            last = error
    what = f"none of the first samples of part '{part.name}' of the mixture can be read; the last: {last}"
    raise DataError(what, "Fix the data, or leave this part out.")


@SOURCES.register("mixture")
def open_mixture(config: MixtureConfig, split: Split, seed: int) -> MixtureSource | None:
    """For evaluation: the concatenation of the parts that hold out samples for it."""
    parts = []
    for name, part in config.parts.items():
        try:
            source = opener_of(part.data.name)(part.data, split, seed)
        except DataError as error:
            raise DataError(f"part '{name}' of the mixture: {error.what}", error.fix) from error
        if source is not None:
            parts.append(WeightedSource(name, as_loader_source(source), part.weight))
    return MixtureSource(parts) if parts else None
