"""Packs whole documents into rows of one size.

Documents are packed inside fixed blocks of consecutive documents, by their lengths alone. Invariants: every token of
every document with at least two tokens is in exactly one row; a document is cut only if it is longer than a row; row
``n`` depends only on the lengths of the documents in its block and of those before, so that documents appended later
change no complete block.

A document longer than a row is cut into pieces of a whole row each, and a remainder. Each piece is treated as a
document of its own: its first token is not predicted, and it does not see the pieces before it. Documents of zero or
one token, which predict nothing, are left out.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from closeranks.core.errors import BadRecordError
from closeranks.data.dataset_protocol import Ints, Tokens

Progress: TypeAlias = Callable[[int, int], None]
"""(tokens done, total tokens)"""

_BLOCK_TOKENS = 1 << 20
_BLOCK_ROWS = 512
_SLICE = 1 << 17
# Segments are read in runs of this many tokens: shorter means more runs, longer reads tokens of the next document.
_RUN = 128


class PackedSegments(NamedTuple):
    """Pieces of documents in the order in which they fill the rows: ``counts`` is the number of pieces in each row."""

    starts: Ints
    lengths: Ints
    counts: Ints


@dataclass(frozen=True, slots=True)
class Packing:
    """Maps a row to its segments. The arrays may be memory-mapped: only the requested rows are read."""

    row_tokens: int
    firsts: Ints
    """Where each row's segments begin in the two arrays below, and where the last row's end. [num_rows + 1]"""
    starts: Ints
    """First token of each segment, as a position in the stream; ascending inside a row."""
    lengths: npt.NDArray[np.int32]
    num_tokens: int
    """Tokens in all rows, without padding."""

    @property
    def num_rows(self) -> int:
        return len(self.firsts) - 1

    @property
    def efficiency(self) -> float:
        """Share of the rows that is not padding."""
        return self.num_tokens / max(1, self.num_rows * self.row_tokens)

    def segments(self, rows: Ints) -> PackedSegments:
        firsts = self.firsts[rows]
        counts = self.firsts[rows + 1] - firsts
        places = np.repeat(firsts - (np.cumsum(counts) - counts), counts) + np.arange(int(counts.sum()))
        return PackedSegments(self.starts[places], self.lengths[places].astype(np.int64), counts)

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """The arrays to save; ``from_arrays`` is the inverse."""
        totals = np.array([self.row_tokens, self.num_tokens], dtype=np.int64)
        return {"totals": totals, "firsts": self.firsts, "starts": self.starts, "lengths": self.lengths}

    @classmethod
    def from_arrays(cls, arrays: Any) -> Packing:
        row_tokens, num_tokens = (int(value) for value in arrays["totals"])
        return cls(row_tokens, arrays["firsts"], arrays["starts"], arrays["lengths"], num_tokens)


def default_block_tokens(row_tokens: int) -> int:
    """Large enough that the half-empty last rows of a block matter little, small enough to be stored close together."""
    return max(_BLOCK_TOKENS, _BLOCK_ROWS * row_tokens)


def pack(
    ends: npt.NDArray[Any], row_tokens: int, block_tokens: int = 0, on_progress: Progress | None = None
) -> Packing:
    """The rows of all documents that end at ``ends``. About 2 seconds for a million documents."""
    if row_tokens < 2:
        raise ValueError(f"a row of {row_tokens} tokens predicts nothing")
    blocks = []
    for bounds in block_bounds(ends, block_tokens or default_block_tokens(row_tokens)):
        blocks.append(pack_block(bounds[:-1], np.diff(bounds), row_tokens))
        if on_progress is not None:
            on_progress(int(bounds[-1]), int(ends[-1]))
    starts, lengths, counts = (_joined([block[part] for block in blocks]) for part in range(3))
    firsts = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(counts)))
    return Packing(row_tokens, firsts, starts, lengths.astype(np.int32), int(lengths.sum()))


def _joined(parts: list[Ints]) -> Ints:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


def block_bounds(ends: npt.NDArray[Any], block_tokens: int) -> Iterator[Ints]:
    """Where the documents of each block begin and end: the document that reaches ``block_tokens`` completes a block.

    Reads the ends front to back, a slice at a time: there may be more of them than fit into memory.
    """
    begin, taken = 0, 0
    waiting = np.zeros(0, dtype=np.int64)
    while len(waiting) or taken < len(ends):
        count = int(np.searchsorted(waiting, begin + block_tokens)) + 1
        if count > len(waiting) and taken < len(ends):
            waiting = np.concatenate((waiting, np.asarray(ends[taken : taken + _SLICE], dtype=np.int64)))
            taken = min(taken + _SLICE, len(ends))
            continue
        yield np.concatenate((np.array([begin]), waiting[:count]))
        begin, waiting = int(waiting[:count][-1]), waiting[count:]


def pack_block(starts: Ints, lengths: Ints, row_tokens: int) -> PackedSegments:
    """The rows of one block of documents, in the order of their first tokens."""
    useful = lengths >= 2
    starts, lengths = starts[useful], lengths[useful]
    num_whole, rests = np.divmod(lengths, row_tokens)
    of_whole = np.repeat(np.arange(len(lengths)), num_whole)
    piece = np.arange(len(of_whole)) - np.repeat(np.cumsum(num_whole) - num_whole, num_whole)
    has_rest = rests > 0
    rest_rows = best_fit(rests[has_rest], row_tokens)

    all_starts = np.concatenate((starts[of_whole] + piece * row_tokens, (starts + lengths - rests)[has_rest]))
    all_lengths = np.concatenate((np.full(len(of_whole), row_tokens, dtype=np.int64), rests[has_rest]))
    rows = np.concatenate((np.arange(len(of_whole)), len(of_whole) + rest_rows))
    num_rows = int(rows.max(initial=-1)) + 1
    row_begins = np.full(num_rows, np.iinfo(np.int64).max)
    np.minimum.at(row_begins, rows, all_starts)
    order = np.lexsort((all_starts, row_begins[rows]))
    counts = np.bincount(rows, minlength=num_rows)[np.argsort(row_begins)]
    return PackedSegments(all_starts[order], all_lengths[order], counts)


def best_fit(lengths: Ints, row_tokens: int) -> Ints:
    """A row for each length (best-fit decreasing): the longest first, each into the fullest row with enough space, else
    into a new one.

    About a microsecond each: rows are grouped by their free space, and the sizes of free space that occur are kept
    sorted.
    """
    rooms: list[int] = []
    waiting: dict[int, list[int]] = {}
    rows = [0] * len(lengths)
    num_rows = 0
    order = np.argsort(-lengths, kind="stable")
    for place, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        found = bisect_left(rooms, length)
        if found == len(rooms):
            row, room = num_rows, row_tokens
            num_rows += 1
        else:
            room = rooms[found]
            row = waiting[room].pop()
            if not waiting[room]:
                del waiting[room], rooms[found]
        rows[place] = row
        left = room - length
        if left:
            if left not in waiting:
                waiting[left] = []
                rooms.insert(bisect_left(rooms, left), left)
            waiting[left].append(row)
    return np.array(rows, dtype=np.int64)


def read_segments(store: Tokens, starts: Ints, lengths: Ints) -> npt.NDArray[Any]:
    """The tokens of all segments, concatenated, in one read of the store. [sum of lengths]"""
    try:
        return _read_runs(store, starts, lengths, min(_RUN, store.num_tokens, int(lengths.max())))
    except BadRecordError:
        # A segment shorter than a run is read past its end: damage there is not the segment's.
        return _read_exactly(store, starts, lengths)


def _read_runs(store: Tokens, starts: Ints, lengths: Ints, run: int) -> npt.NDArray[Any]:
    """Reads segments in runs of one length; nothing outside a segment is read unless it is shorter than a run."""
    num_runs = -(-lengths // run)
    segment = np.repeat(np.arange(len(lengths)), num_runs)
    offset = (np.arange(len(segment)) - np.repeat(np.cumsum(num_runs) - num_runs, num_runs)) * run
    # The last run of a segment starts earlier, so that it ends where the segment does; it overlaps the run before.
    begins = starts[segment] + np.minimum(offset, np.maximum(lengths[segment] - run, 0))
    begins = np.minimum(begins, store.num_tokens - run)
    read = store.read(begins, run)
    skipped = (starts[segment] + offset - begins)[:, None]
    kept = np.minimum(run, lengths[segment] - offset)[:, None]
    column = np.arange(run)
    flat: npt.NDArray[Any] = read[(column >= skipped) & (column < skipped + kept)]
    return flat


def _read_exactly(store: Tokens, starts: Ints, lengths: Ints) -> npt.NDArray[Any]:
    """One read per power of two: runs no longer than their segments."""
    flat = np.empty(int(lengths.sum()), dtype=store.dtype)
    runs = 1 << np.minimum(np.log2(lengths).astype(np.int64), _RUN.bit_length() - 1)
    segment = np.repeat(np.arange(len(lengths)), lengths)
    for run in np.unique(runs).tolist():
        here = runs == run
        flat[here[segment]] = _read_runs(store, starts[here], lengths[here], run)
    return flat


class PackedRows(NamedTuple):
    tokens: npt.NDArray[Any]
    """[n, row_tokens], 0 for padding."""
    documents: npt.NDArray[np.int32]
    """Number of the document in its row, from 0; -1 for padding. [n, row_tokens]"""


def fill_rows(flat: npt.NDArray[Any], lengths: Ints, counts: Ints, row_tokens: int) -> PackedRows:
    """Segments one after the other from the left of each row, padding on the right."""
    row = np.repeat(np.arange(len(counts)), counts)
    used = np.bincount(row, weights=lengths, minlength=len(counts)).astype(np.int64)
    number = np.arange(len(lengths)) - np.repeat(np.cumsum(counts) - counts, counts)
    taken = np.arange(row_tokens) < used[:, None]
    tokens = np.zeros((len(counts), row_tokens), dtype=flat.dtype)
    tokens[taken] = flat
    documents = np.full((len(counts), row_tokens), -1, dtype=np.int32)
    documents[taken] = np.repeat(number, lengths)
    return PackedRows(tokens, documents)
