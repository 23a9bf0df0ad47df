"""Reads windows of tokens from a stream that is stored in several files.

Invariant: windows may begin anywhere and span several files; each is copied once, into its row of the result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from closeranks.data.dataset_protocol import Ints
from closeranks.data.formats.file_rows import FileRows
from closeranks.data.formats.spans import spans


class TokenWindowReader:
    """``stream`` returns all tokens of the n-th file, contiguous, as many as ``rows`` counts for it."""

    def __init__(self, rows: FileRows, dtype: np.dtype[Any], stream: Callable[[int], npt.NDArray[Any]]) -> None:
        self._rows, self._dtype, self._stream = rows, dtype, stream

    def read(self, starts: Ints, length: int) -> npt.NDArray[Any]:
        """``length`` tokens from each start, one row each."""
        starts = self._rows.check_bounds(starts)
        if length == 0:
            return np.empty((len(starts), 0), self._dtype)
        lasts = self._rows.check_bounds(starts + (length - 1))
        if len(self._rows.names) == 1:
            return self._all_of(0, length)[starts]
        tokens = np.empty((len(starts), length), self._dtype)
        crosses = self._rows.files_at(starts) != self._rows.files_at(lasts)
        whole = np.flatnonzero(~crosses)
        for span in spans(self._rows.firsts, starts[whole]):
            tokens[whole[span.positions]] = self._all_of(span.container, length)[span.inside]
        for row in np.flatnonzero(crosses).tolist():
            self._across(int(starts[row]), tokens[row])
        return tokens

    def files_of(self, starts: Ints, length: int) -> list[str]:
        """In the order first needed, without duplicates."""
        starts = self._rows.check_bounds(starts)
        first = self._rows.files_at(starts).tolist()
        last = self._rows.files_at(self._rows.check_bounds(starts + max(length - 1, 0))).tolist()
        touched = dict.fromkeys(file for a, b in zip(first, last, strict=True) for file in range(a, b + 1))
        return [self._rows.names[file] for file in touched]

    def _all_of(self, file: int, length: int) -> npt.NDArray[Any]:
        """All windows of a file as rows of one overlapping view: selecting rows of it copies each in one operation."""
        tokens, step = self._stream(file), self._dtype.itemsize
        return np.ndarray((max(len(tokens) - length + 1, 0), length), self._dtype, tokens.data, 0, (step, step))

    def _across(self, start: int, into: npt.NDArray[Any]) -> None:
        """One window that begins in a file and ends in another."""
        done, file = 0, int(self._rows.files_at(np.asarray([start]))[0])
        while done < len(into):
            begin = start + done - int(self._rows.firsts[file])
            part = self._stream(file)[begin : begin + len(into) - done]
            into[done : done + len(part)] = part
            done, file = done + len(part), file + 1
