"""Turns stored tokens into samples of ``seq_len`` tokens and the one that follows.

Either as windows over the stream (``stream``), or as whole documents packed into rows, with document numbers to
separate them (``documents``, see ``data.packing``). Invariant: a sample is a pure function of its index, alone or in
any batch; a batch is one read of the store, whatever its size.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from closeranks.core.errors import DataError
from closeranks.core.protocols import Batch
from closeranks.data.config import TokensConfig
from closeranks.data.dataset_protocol import Ints, Tokens
from closeranks.data.files.protocol import Files
from closeranks.data.formats.open import open_tokens
from closeranks.data.formats.record_index.saved_index import IndexLocation, saved_index
from closeranks.data.packing import Packing, default_block_tokens, fill_rows, pack, read_segments
from closeranks.data.sources.registry import SOURCES, Split
from closeranks.data.sources.splits import close, files_of, index_location, name_of, samples_of, samples_per_block
from closeranks.data.sources.tensors import to_tensor
from closeranks.data.timing import stage

_LOG = logging.getLogger(__name__)
_PACKING_VERSION = 1
"""Part of every packed source's identity: changing the packing changes the samples."""


class TokenWindows:
    """Sample i is tokens ``[i * seq_len, (i + 1) * seq_len]`` of the stream: neighbours share one token, which is the
    last target of one and the first input of the next. Tokens beyond the last whole sample are not used."""

    def __init__(self, store: Tokens, files: Files, seq_len: int, samples: range, identity: str) -> None:
        self.identity = identity
        self.vocab_size = store.vocab_size
        self.block = samples_per_block(store.block, seq_len)
        self._store, self._files = store, files
        self._seq_len = seq_len
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def read(self, indices: Ints) -> Batch:
        return {"tokens": to_tensor(self._store.read(self._starts(indices), self._seq_len + 1))}

    def where(self, index: int) -> str:
        return str(self._store.where((self._samples.start + index) * self._seq_len))

    def prefetch(self, indices: Ints) -> None:
        if self._files.is_local:
            return
        self._files.prefetch(self._store.files_of(self._starts(indices), self._seq_len + 1))

    def close(self) -> None:
        close(self._store, self._files)

    def _starts(self, indices: Ints) -> Ints:
        return (np.asarray(indices, dtype=np.int64) + self._samples.start) * self._seq_len


class PackedDocuments:
    """Sample i is row i of the packing: ``tokens``, and in ``documents`` which document each belongs to, counted
    within the row from 0, -1 for padding."""

    def __init__(
        self, store: Tokens, files: Files, packing: Callable[[], Packing], samples: range, identity: str
    ) -> None:
        self.identity = identity
        self.vocab_size = store.vocab_size
        self._store, self._files = store, files
        self._open_packing = packing
        self._packing = packing()
        self._samples = samples
        self.block = samples_per_block(store.block, self._packing.row_tokens)
        self.efficiency = self._packing.efficiency
        """Share of the rows' tokens that is not padding."""

    def __len__(self) -> int:
        return len(self._samples)

    def read(self, indices: Ints) -> Batch:
        starts, lengths, counts = self._packing.segments(self._rows(indices))
        flat = read_segments(self._store, starts, lengths)
        with stage("collate"):
            rows = fill_rows(flat, lengths, counts, self._packing.row_tokens)
            return {"tokens": to_tensor(rows.tokens), "documents": to_tensor(rows.documents)}

    def where(self, index: int) -> str:
        starts = self._packing.segments(self._rows(np.array([index]))).starts
        more = len(starts) - 1
        rest = f" and {more} more document{'s' if more > 1 else ''}" if more else ""
        return f"{self._store.where(int(starts[0]))}{rest}"

    def prefetch(self, indices: Ints) -> None:
        if self._files.is_local:
            return
        starts, lengths, _ = self._packing.segments(self._rows(indices))
        # Both ends of each segment: it may begin in one file and end in the next.
        ends = np.stack((starts, starts + lengths - 1), axis=1).reshape(-1)
        self._files.prefetch(self._store.files_of(ends, 1))

    def close(self) -> None:
        close(self._store, self._files)

    def __getstate__(self) -> dict[str, Any]:
        """Without the packing: it is memory-mapped, and is opened again where it is needed."""
        return {name: value for name, value in vars(self).items() if name != "_packing"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._packing = self._open_packing()

    def _rows(self, indices: Ints) -> Ints:
        return np.asarray(indices, dtype=np.int64) + self._samples.start


@SOURCES.register("tokens")
def open_tokens_source(config: TokensConfig, split: Split, seed: int) -> TokenWindows | PackedDocuments | None:
    files = files_of(config, split)
    if files is None:
        return None
    location = index_location(config)
    store = open_tokens(files, config.format, location, config.field)
    name = name_of(config, files)
    if config.packing == "documents":
        return _open_packed(config, split, store, files, location)
    num_samples = max(0, store.num_tokens - 1) // config.seq_len
    if num_samples < 1:
        what = f"{name} has {store.num_tokens} tokens, too few for one sample of data.seq_len = {config.seq_len}"
        raise DataError(what, f"Give at least {config.seq_len + 1} tokens, or set a smaller data.seq_len.")
    samples = samples_of(config, split, num_samples, name)
    identity = f"{name} ({_shown(split, config, samples)}, {store.identity})"
    return TokenWindows(store, files, config.seq_len, samples, identity)


def _open_packed(
    config: TokensConfig, split: Split, store: Tokens, files: Files, location: IndexLocation
) -> PackedDocuments:
    name = name_of(config, files)
    opened = partial(saved_packing, store, files, location, config.seq_len + 1, config.format, config.field)
    packing = opened()
    if packing.num_rows == 0:
        what = f"{name} has no document of two tokens or more"
        raise DataError(what, "Give it longer documents, or set data.packing = 'stream'.")
    share = f"{100 * (1 - packing.efficiency):.2f}% of them padding"
    rows = f"{packing.num_rows} rows of {packing.row_tokens} tokens, {share}"
    _LOG.info("%s (%s): %d documents in %s", name, split, len(store.ends), rows)
    samples = samples_of(config, split, packing.num_rows, name)
    identity = f"{name} ({_shown(split, config, samples)}, packing {_PACKING_VERSION}, {store.identity})"
    return PackedDocuments(store, files, opened, samples, identity)


def _shown(split: Split, config: TokensConfig, samples: range) -> str:
    return f"{split}, seq_len {config.seq_len}, samples {samples.start}:{samples.stop}"


def saved_packing(
    store: Tokens, files: Files, location: IndexLocation, row_tokens: int, format: str, field: str
) -> Packing:
    """The packing of all documents, built once per host and memory-mapped from then on."""
    block_tokens = default_block_tokens(row_tokens)
    settings: dict[str, str | int] = {
        "packing": _PACKING_VERSION,
        "row_tokens": row_tokens,
        "block_tokens": block_tokens,
        "format": format,
        "field": field,
    }

    def build(progress: Callable[[int, int], None]) -> dict[str, Any]:
        itemsize = store.dtype.itemsize
        return pack(
            store.ends, row_tokens, block_tokens, lambda done, total: progress(done * itemsize, total * itemsize)
        ).arrays()

    return Packing.from_arrays(saved_index(location, files, files.list(), "packing", build, settings))
