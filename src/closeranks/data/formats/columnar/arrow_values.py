"""Converts columns of Arrow arrays into records.

By type alone: numbers, strings and binaries become Python values, lists of numbers NumPy arrays, other lists lists,
structs dicts, null None. An image or sound as Hugging Face stores it (a struct of ``bytes`` and ``path``) becomes its
bytes. Timestamps and durations become integers in the column's own unit, decimals floats. Invariant: arrays may come
from a damaged file, so ``validate_rows`` checks every offset of the requested rows before it is followed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from closeranks.core.errors import BadRecordError, DataError
from closeranks.data.dataset_protocol import Record

Array: TypeAlias = Any
"""A ``pyarrow.Array``; pyarrow has no type annotations."""
Values: TypeAlias = list[Any]

DAMAGE = (pa.ArrowInvalid, pa.ArrowIndexError, pa.ArrowKeyError, pa.ArrowNotImplementedError, UnicodeDecodeError)
"""What Arrow raises for malformed bytes, apart from an ``OSError`` without an errno."""


def is_damage(error: BaseException) -> bool:
    """Whether the error means damaged data. Arrow reports malformed bytes as ``OSError`` too, without an ``errno``."""
    return isinstance(error, DAMAGE) or (isinstance(error, OSError) and error.errno is None)


@contextmanager
def raise_as_bad_record(where: Callable[[], str]) -> Iterator[None]:
    """Errors of damaged data inside become a ``BadRecordError`` at ``where``, which is called only then."""
    try:
        yield
    except BadRecordError as error:
        raise BadRecordError(f"bad record in {where()}: {error.what}", error.fix) from error
    except DataError:
        raise
    except MemoryError as error:
        raise DataError(f"there is no memory to decode {where()}", "Write it again in smaller pieces.") from error
    except Exception as error:
        if not is_damage(error):
            raise
        raise BadRecordError(f"bad record in {where()}: {str(error).splitlines()[0]}") from error


def check_columns(names: Sequence[str], columns: Sequence[str], url: str) -> Sequence[str]:
    """The names asked for, or all."""
    missing = [name for name in names if name not in columns]
    if missing:
        raise DataError(f"'{url}' has no column '{missing[0]}'", f"It has {', '.join(columns)}.")
    return names or columns


def records_of(fields: Sequence[Any], arrays: Sequence[Array]) -> list[Record]:
    """One record per row, from a checked array per field."""
    names = [field.name for field in fields]
    columns = [_column(field, array) for field, array in zip(fields, arrays, strict=True)]
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def contiguous_runs(rows: npt.NDArray[np.int64]) -> list[slice]:
    """Row numbers (not empty, ascending) as runs of consecutive rows."""
    if len(rows) == 1:
        return [slice(int(rows[0]), int(rows[0]) + 1)]
    cuts = np.flatnonzero(rows[1:] != rows[:-1] + 1)
    begins, lasts = [int(rows[0]), *rows[cuts + 1].tolist()], [*rows[cuts].tolist(), int(rows[-1])]
    return [slice(begin, last + 1) for begin, last in zip(begins, lasts, strict=True)]


def validate_rows(array: Array, runs: Sequence[slice]) -> Array:
    """These rows of an array, or of its chunks, as one array. A single run is not copied."""
    found = [array.slice(run.start, run.stop - run.start) for run in runs]
    if isinstance(array, pa.ChunkedArray):
        found = [part for run in found for part in run.chunks]
    for part in found:
        part.validate(full=True)
    return found[0] if len(found) == 1 else pa.concat_arrays(found)


def lengths_of(array: Array) -> npt.NDArray[np.int64] | None:
    """The number of elements of each list, or bytes of each string, from the offsets alone; 0 for null. None if the
    type has no lengths."""
    array = _plain(array)
    measure = next((measure for is_kind, measure in _MEASURES if is_kind(array.type)), None)
    if measure is None:
        return None
    found = measure(array)
    lengths: npt.NDArray[np.int64] = pc.fill_null(found, 0).to_numpy(zero_copy_only=False).astype(np.int64)
    return lengths


def is_compatible_type(one: Any, other: Any) -> bool:
    """Whether two files may be read as one: types are compatible if they become the same kind of value. A column with
    only nulls is compatible with any."""
    one, other = _normal(one), _normal(other)
    if pa.types.is_null(one) or pa.types.is_null(other):
        return True
    if pa.types.is_struct(one) and pa.types.is_struct(other):
        mine, theirs = {f.name: f.type for f in one.fields}, {f.name: f.type for f in other.fields}
        return mine.keys() == theirs.keys() and all(is_compatible_type(mine[name], theirs[name]) for name in mine)
    if _is_list(one) and _is_list(other):
        return is_compatible_type(one.value_type, other.value_type)
    return bool(one == other) or (_is_text(one) and _is_text(other)) or (_is_binary(one) and _is_binary(other))


def _normal(kind: Any) -> Any:
    while pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        kind = kind.value_type
    return _normal(kind.storage_type) if _is_extension(kind) else kind


def _column(field: Any, array: Array) -> Values:
    values = values_of(array)
    return [None if value is None else _stacked(value) for value in values] if _is_dense(field) else values


def _is_dense(field: Any) -> bool:
    """Hugging Face's ``Array2D`` to ``Array5D``: nested lists that are one array, whose rows have equal length."""
    name = field.type.extension_name if _is_extension(field.type) else ""
    name = name or (field.metadata or {}).get(b"ARROW:extension:name", b"").decode()
    return name.startswith("datasets.features.features.Array")


def _stacked(value: Any) -> Any:
    return np.stack([_stacked(part) for part in value]) if isinstance(value, list) else value


def values_of(array: Array) -> Values:
    """The values of a checked array."""
    array = _plain(array)
    for is_kind, convert in _KINDS:
        if is_kind(array.type):
            return convert(array)
    raise DataError(f"a column has the type {array.type}, which cannot be converted to records", "Leave it out.")


def _plain(array: Array) -> Array:
    """The same values in a type with the usual storage."""
    kind = array.type
    if _is_extension(kind):
        return _plain(array.storage)
    if pa.types.is_dictionary(kind):
        return _plain(array.dictionary_decode())
    if pa.types.is_run_end_encoded(kind):
        return _plain(pc.run_end_decode(array))
    if pa.types.is_decimal(kind):
        return array.cast(pa.float64())
    if pa.types.is_temporal(kind) and not pa.types.is_interval(kind):
        return array.cast(pa.int32() if kind.bit_width == 32 else pa.int64())
    return array


def _numbers(array: Array) -> Values:
    found: Values = array.to_pylist() if array.null_count else array.to_numpy(zero_copy_only=False).tolist()
    return found


def _objects(array: Array) -> Values:
    found: Values = array.to_pylist()
    return found


def _lists(array: Array) -> Values:
    bounds = array.offsets.to_numpy()
    first = int(bounds[0])
    return _with_nulls(array, _cut(array.values.slice(first, int(bounds[-1]) - first), (bounds - first).tolist()))


def _fixed_lists(array: Array) -> Values:
    present = array.drop_null() if array.null_count else array
    rows = _dense(present)
    size = array.type.list_size
    found = _cut(_inner(present), [row * size for row in range(len(present) + 1)]) if rows is None else list(rows)
    if not array.null_count:
        return found
    following = iter(found)
    return [next(following) if is_there else None for is_there in array.is_valid().to_pylist()]


def _cut(inner: Array, bounds: Sequence[int]) -> Values:
    """A list per row. The result for a row must not depend on its neighbours: with numbers, only rows that contain a
    null become lists, the others arrays."""
    rows = _dense(inner)
    if rows is None and _is_number(_plain(inner).type):
        parts = [_plain(inner.slice(begin, end - begin)) for begin, end in pairwise(bounds)]
        return [part.to_pylist() if part.null_count else _dense(part) for part in parts]
    found = values_of(inner) if rows is None else rows
    return [found[begin:end] for begin, end in pairwise(bounds)]


def _dense(array: Array) -> npt.NDArray[Any] | None:
    """Numbers, or lists of equal length of them, as one array without a copy; None if there are nulls or other
    types."""
    array = _plain(array)
    if array.null_count:
        return None
    if pa.types.is_fixed_size_list(array.type):
        inner = _dense(_inner(array))
        return None if inner is None else inner.reshape(len(array), array.type.list_size, *inner.shape[1:])
    if not _is_number(array.type):
        return None
    numbers: npt.NDArray[Any] = array.to_numpy(zero_copy_only=False)
    return numbers


def _inner(array: Array) -> Array:
    """The elements of fixed-size lists; ``values`` alone ignores the offset of a slice."""
    size = array.type.list_size
    inner = array.values.slice(array.offset * size, len(array) * size)
    if len(inner) != len(array) * size:
        raise pa.ArrowInvalid(f"{len(array)} lists of {size} have only {len(inner)} values")
    return inner


def _structs(array: Array) -> Values:
    names = [field.name for field in array.type.fields]
    parts = array.flatten()
    if sorted(names) == ["bytes", "path"] and _is_binary(_normal(array.type.field("bytes").type)):
        return _media(*(parts[names.index(name)] for name in ("bytes", "path")))
    columns = [values_of(part) for part in parts]
    rows = [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)] if names else [{}] * len(array)
    return _with_nulls(array, rows)


def _media(data: Array, path: Array) -> Values:
    found = values_of(data)
    if data.null_count:
        for blob, name in zip(found, values_of(path), strict=True):
            if blob is None and name is not None:
                raise BadRecordError(
                    f"the file '{name}' is referenced but not stored", "Save the dataset with its files embedded."
                )
    return found


def _with_nulls(array: Array, values: Values) -> Values:
    if array.null_count:
        for row in np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False)).tolist():
            values[row] = None
    return values


def _is_extension(kind: Any) -> bool:
    return isinstance(kind, pa.BaseExtensionType)


def _is_number(kind: Any) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def _is_text(kind: Any) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _is_binary(kind: Any) -> bool:
    return bool(
        pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_binary_view(kind)
        or pa.types.is_fixed_size_binary(kind)
    )


def _is_list(kind: Any) -> bool:
    return _is_variable_list(kind) or bool(pa.types.is_fixed_size_list(kind))


def _is_variable_list(kind: Any) -> bool:
    """A map is stored as a list of pairs, and becomes a list of dicts with ``key`` and ``value``."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_map(kind))


_KINDS: tuple[tuple[Callable[[Any], bool], Callable[[Array], Values]], ...] = (
    (_is_number, _numbers),
    (_is_text, _objects),
    (_is_binary, _objects),
    (_is_variable_list, _lists),
    (pa.types.is_fixed_size_list, _fixed_lists),
    (pa.types.is_struct, _structs),
    (pa.types.is_null, _objects),
)
_MEASURES = (
    (pa.types.is_list, pc.list_value_length),
    (pa.types.is_large_list, pc.list_value_length),
    (pa.types.is_fixed_size_list, pc.list_value_length),
    (pa.types.is_string, pc.binary_length),
    (pa.types.is_large_string, pc.binary_length),
    (pa.types.is_binary, pc.binary_length),
    (pa.types.is_large_binary, pc.binary_length),
)
