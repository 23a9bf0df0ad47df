"""Reads a field of records as a stream of tokens.

A field of integers (a list, an array, a ``.npy`` member) gives those as tokens, a field of text or plain bytes its
bytes (a vocabulary of 256). Each record is a document. Its length is determined once, by reading all records, and
saved; the same pass determines the dtype of the tokens. Invariants: a record whose field is not a list of token ids
stops that pass with a ``DataError`` (without its length, the position of every later token is unknown), one that fails
later is a ``BadRecordError``; each record that a batch touches is read once. Windows over long records read them whole
each time: for speed, convert them to shards with ``closeranks data build``.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from closeranks.core.errors import BadRecordError, DataError
from closeranks.data.dataset_protocol import Ints, Record, RecordLocation, Records, select_fields
from closeranks.data.decode import LazyLocation, decode, is_plain
from closeranks.data.files.protocol import Files
from closeranks.data.formats.record_index.saved_index import Arrays, IndexLocation, Progress, saved_index

FIELDS = ("tokens", "input_ids", "text")
"""The fields to try if none is named."""
NAMES = (*FIELDS, "npy", "txt", "content")

_BATCH = 512
_DTYPES = (np.dtype(np.uint16), np.dtype(np.uint32), np.dtype(np.int64))


class RecordTokens:
    """The records of a store, concatenated, as one stream."""

    def __init__(self, records: Records, files: Files, field: str, location: IndexLocation) -> None:
        self._files, self._given, self._location = files, field, location
        self._field = field or _found_field(records, files)
        self._records = records = select_fields(records, (self._field,))
        settings: Mapping[str, str | int] = {"field": self._field, "records": records.identity, "version": 1}
        index = saved_index(location, files, files.list(), "tokens-of", self._build, settings)
        self._ends: Ints = index["ends"]
        is_text, largest = index["summary"].tolist()
        self.vocab_size = 256 if is_text else 0
        self.dtype: np.dtype[Any] = np.dtype(np.uint8) if is_text else _dtype_for(largest)
        self.identity = f"{index.identity}:{records.identity}"
        per_record = self.num_tokens // max(len(records), 1)
        self.block = max(1, records.block * per_record) if records.block else 0

    def __reduce__(self) -> tuple[Any, ...]:
        return RecordTokens, (self._records, self._files, self._given, self._location)

    @property
    def num_tokens(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    @property
    def ends(self) -> npt.NDArray[Any]:
        return self._ends

    def read(self, starts: Ints, length: int) -> npt.NDArray[Any]:
        touched = self._touched(starts, length)
        found = np.empty((len(touched.starts), length), self.dtype)
        if found.size == 0:
            return found
        documents = self._documents(touched.documents)
        begins = np.where(touched.documents > 0, self._ends[touched.documents - 1], 0)
        for row, start in enumerate(touched.starts.tolist()):
            at, done = int(touched.firsts[row]), 0
            while done < length:
                inside = start + done - int(begins[at])
                part = documents[at][inside : inside + length - done]
                found[row, done : done + len(part)] = part
                done, at = done + len(part), at + 1
        return found

    def _documents(self, numbers: Ints) -> list[npt.NDArray[Any]]:
        documents = []
        begins = np.where(numbers > 0, self._ends[numbers - 1], 0)
        lengths = (self._ends[numbers] - begins).tolist()
        for number, record, length in zip(numbers.tolist(), self._records.read(numbers), lengths, strict=True):
            tokens = self._tokens_of(record, number, self.dtype)
            if len(tokens) != length:
                self._refuse(number, f"has {len(tokens)} tokens, and had {length} when it was indexed")
            documents.append(tokens)
        return documents

    def _touched(self, starts: Ints, length: int) -> _Touched:
        starts = np.asarray(starts, np.int64)
        if len(starts) and (int(starts.min()) < 0 or int(starts.max()) + length > self.num_tokens):
            raise DataError(f"'{self._files.url}' holds {self.num_tokens} tokens, and the request is out of range")
        firsts = np.searchsorted(self._ends, starts, side="right")
        lasts = np.searchsorted(self._ends, starts + max(length - 1, 0), side="right")
        # Every document between first and last, including empty ones: windows then advance without a search.
        pairs = zip(firsts.tolist(), lasts.tolist(), strict=True)
        spanned = [np.arange(first, last + 1) for first, last in pairs]
        documents = np.unique(np.concatenate([np.empty(0, np.int64), *spanned]))
        return _Touched(starts, documents, np.searchsorted(documents, firsts))

    def where(self, start: int) -> RecordLocation:
        return self._records.where(int(self._touched(np.array([start]), 1).documents[0]))

    def files_of(self, starts: Ints, length: int) -> Sequence[str]:
        firsts = np.searchsorted(self._ends, starts, side="right").tolist()
        lasts = np.searchsorted(self._ends, np.asarray(starts) + max(length - 1, 0), side="right").tolist()
        touched = [number for first, last in zip(firsts, lasts, strict=True) for number in range(first, last + 1)]
        return self._records.files_of(np.array([*dict.fromkeys(touched)], np.int64))

    def close(self) -> None:
        self._records.close()

    def _tokens_of(self, record: Record, number: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        value = self._value(record, number)
        try:
            tokens = tokens_in(value)
        except ValueError as error:
            self._refuse(number, str(error))
        if len(tokens) and int(tokens.max()) > np.iinfo(dtype).max:
            self._refuse(number, f"has the id {int(tokens.max())}, larger than any when it was indexed")
        return tokens.astype(dtype, copy=False)

    def _value(self, record: Record, number: int) -> Any:
        """Plain bytes are the tokens, even if they look like something else, such as an image."""
        value = record.get(self._field)
        if isinstance(value, bytes) and is_plain(self._field):
            return np.frombuffer(value, np.uint8)
        return decode(record, fields={"tokens": self._field}, where=LazyLocation(self._records.where, number)).get(
            "tokens"
        )

    def _refuse(self, number: int, reason: str) -> NoReturn:
        raise BadRecordError(f"bad record at {self._records.where(number)}: field '{self._field}' {reason}")

    def _build(self, progress: Progress) -> Arrays:
        lengths, largest, kinds = array("q"), 0, set()
        for first in range(0, len(self._records), _BATCH):
            numbers = np.arange(first, min(first + _BATCH, len(self._records)))
            try:
                records = self._records.read(numbers)
                for number, record in zip(numbers.tolist(), records, strict=True):
                    tokens = self._tokens_of(record, number, _DTYPES[-1])
                    lengths.append(len(tokens))
                    kinds.add(_is_text(record, self._field))
                    largest = max(largest, int(tokens.max())) if len(tokens) else largest
            except BadRecordError as error:
                raise DataError(
                    f"{error.what}, so no token after it can be numbered",
                    "Fix or remove the record, or leave it out with 'closeranks data build'.",
                ) from error
            progress(int(numbers[-1]) + 1, len(self._records))
        if len(kinds) > 1:
            raise DataError(f"field '{self._field}' of '{self._files.url}' is text in some records and ids in others")
        return {
            "ends": np.cumsum(np.frombuffer(lengths, np.int64)) if lengths else np.empty(0, np.int64),
            "summary": np.array([kinds == {True}, largest], np.int64),
        }


class _Touched(NamedTuple):
    starts: Ints
    documents: Ints
    """Numbers of all documents that any window overlaps, ascending, each once."""
    firsts: Ints
    """For each window, the index of its first document in ``documents``."""


def tokens_in(value: Any) -> npt.NDArray[Any]:
    """The ids in a field; ``ValueError`` completes "field 'x' ..."."""
    if isinstance(value, str):
        return np.frombuffer(value.encode("utf-8", "surrogatepass"), np.uint8)
    if type(value) is int:  # from a format that stores a list of one as its element
        value = [value]
    if not isinstance(value, (list, tuple, np.ndarray)):
        raise ValueError(f"is of type {type(value).__name__}, neither text nor a list of ids")
    try:
        tokens = np.asarray(value)
    except ValueError as error:
        raise ValueError("is not a flat list of ids") from error
    if tokens.size == 0:
        return np.empty(0, np.int64)
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ValueError(f"is {tokens.dtype}{[*tokens.shape]} and not a flat list of ids")
    if tokens.dtype.kind == "u" and tokens.dtype.itemsize == 8 and int(tokens.max()) >= 2**63:
        raise ValueError(f"has the id {int(tokens.max())}")
    if tokens.dtype.kind == "i" and int(tokens.min()) < 0:
        raise ValueError(f"has the negative id {int(tokens.min())}")
    return tokens


def _is_text(record: Record, field: str) -> bool:
    """Whether the field holds text or bytes rather than ids; also works for an empty one."""
    if field not in record:
        return isinstance(decode(record, fields={"tokens": field})["tokens"], str)
    value = record[field]
    return isinstance(value, (str, bytes)) and not field.endswith("npy")


def _dtype_for(largest: int) -> np.dtype[Any]:
    return next(dtype for dtype in _DTYPES if largest <= np.iinfo(dtype).max)


def _found_field(records: Records, files: Files) -> str:
    if len(records) == 0:
        raise DataError(f"'{files.url}' holds no records")
    first = records.read(np.array([0]))[0]
    found = [name for name in NAMES if name in first]
    if not found:
        raise DataError(
            f"the records of '{files.url}' have no field {', '.join(FIELDS[:-1])} or {FIELDS[-1]}",
            f"Say which field holds tokens or text (data.field): {', '.join(sorted(map(str, first)))}.",
        )
    return found[0]
