"""Collates the values of many records into one tensor per field.

The dtype and shape of a field are inferred once, from the first records, and then fixed. Invariant: a sample's tensor
does not depend on the batch it is read in; a value that does not fit is refused with an error that names the field,
never truncated, rounded to an integer or wrapped around.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from closeranks.core.errors import DataError
from closeranks.data.sources.tensors import is_numeric, tensor_dtype, to_tensor

Decoded: TypeAlias = Mapping[str, Any]
Columns: TypeAlias = dict[str, "CollatedField"]


class FieldMismatch(Exception):
    """The value of one row does not fit its field."""

    def __init__(self, row: int, reason: str) -> None:
        super().__init__(reason)
        self.row = row


@dataclass(frozen=True, slots=True)
class CollatedField:
    """The dtype and shape of one field, the same for every sample."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    is_image: bool = False
    """A uint8 image, height x width x channels; its tensor is channels x height x width, from 0 to 1."""

    def __str__(self) -> str:
        return describe_type(self.dtype, self.shape)


def describe_type(dtype: np.dtype[Any], shape: Sequence[int]) -> str:
    return f"{dtype.name}[{','.join(map(str, shape))}]"


def as_array(value: Any) -> npt.NDArray[Any] | None:
    """A value as an array of numbers; None if that is impossible (text, None, lists of different lengths)."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return np.frombuffer(value, dtype=np.uint8)
    try:
        array = np.asarray(value)
    except ValueError:
        return None
    return array if is_numeric(array.dtype) else None


def infer_field(values: Sequence[Any], *, is_image: bool) -> CollatedField | None:
    """The field that these values make: the most frequent shape, a dtype that holds all of them; None if they cannot be
    tensors."""
    arrays = [as_array(value) for value in values]
    found = [array for array in arrays if array is not None]
    if not found or len(found) < len(arrays):
        return None
    shape = Counter(array.shape for array in found).most_common(1)[0][0]
    dtype = tensor_dtype(np.result_type(*(array.dtype for array in found)))
    return CollatedField(dtype, shape, is_image and dtype == np.uint8 and len(shape) in (2, 3))


def infer_fields(records: Sequence[Decoded], images: Collection[str], identity: str, *, is_asked_for: bool) -> Columns:
    """The fields of a batch, by its first records: all that most records have and that can be tensors; a field that was
    requested by name must be one. ``images``: fields that hold images."""
    counts = Counter(name for record in records for name in record)
    columns = {}
    for name in counts:
        if 2 * counts[name] <= len(records):
            continue
        values = [record[name] for record in records if name in record]
        field = infer_field(values, is_image=name in images)
        if field is not None:
            columns[name] = field
        elif is_asked_for:
            misfit = next((value for value in values if as_array(value) is None), values[0])
            what = f"'{name}' of {identity} is {_named(misfit)}, which is not a tensor"
            raise DataError(what, "Leave it out of data.fields, or make a tensor of it in data.transform.")
    if not columns:
        what = f"no field of {identity} can be a tensor: {', '.join(sorted(counts)) or 'there are none'}"
        raise DataError(what, "Name a function in data.transform that makes tensors of them.")
    return columns


def is_inside(name: str, field: str) -> bool:
    """Whether a decoded value comes from this field of a record: nested values have dotted names."""
    return name == field or name.startswith(f"{field}.")


def stack(field: CollatedField, values: Sequence[Any]) -> Tensor:
    """One row per value; ``FieldMismatch`` for the first that does not fit the field."""
    stacked = np.empty((len(values), *field.shape), dtype=field.dtype)
    for row, value in enumerate(values):
        is_ready = isinstance(value, np.ndarray) and value.dtype == field.dtype and value.shape == field.shape
        stacked[row] = value if is_ready else _fitted(row, value, field)
    return _scaled(stacked) if field.is_image else to_tensor(stacked)


def _fitted(row: int, value: Any, field: CollatedField) -> npt.NDArray[Any]:
    array = as_array(value)
    if array is None:
        raise FieldMismatch(row, f"is {_named(value)}, which is not a tensor")
    if array.shape != field.shape:
        raise FieldMismatch(row, f"is {describe_type(array.dtype, array.shape)} where the others are {field}")
    if array.dtype != field.dtype and not _fits(array, field.dtype):
        raise FieldMismatch(row, f"is {describe_type(array.dtype, array.shape)}, which does not fit into {field}")
    return array


def is_equal_tensor(one: Any, other: Any) -> bool:
    """Whether two values become the same tensor."""
    first, second = as_array(one), as_array(other)
    if first is None or second is None:
        return False
    return first.dtype == second.dtype and np.array_equal(first, second, equal_nan=True)


def _fits(array: npt.NDArray[Any], dtype: np.dtype[Any]) -> bool:
    if dtype.kind == "f":
        return True
    if array.dtype.kind == "f" or dtype.kind == "b":
        return False
    if np.can_cast(array.dtype, dtype, "safe") or array.size == 0:
        return True
    limits = np.iinfo(dtype)
    return bool(limits.min <= int(array.min()) and int(array.max()) <= limits.max)


def _named(value: Any) -> str:
    if isinstance(value, str):
        return f"the text {value[:40]!r}{'...' if len(value) > 40 else ''}"
    return "nothing" if value is None else f"a value of type {type(value).__name__}"


def _scaled(images: npt.NDArray[np.uint8]) -> Tensor:
    """[n, h, w, c] or [n, h, w] in 0..255 -> [n, c, h, w] in 0..1, in one pass over the pixels."""
    pixels = torch.from_numpy(images if images.ndim == 4 else images[..., None]).permute(0, 3, 1, 2)
    return torch.empty(pixels.shape, dtype=torch.float32).copy_(pixels).div_(255.0)
