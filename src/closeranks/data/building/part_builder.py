"""Builds one part: reads its inputs and writes its shards.

Invariant: the result of a part is determined by the build spec alone. An interrupted part continues after its last
finished shard: items up to there are read again, but neither encoded nor written.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache, partial
from itertools import accumulate, islice
from typing import Any, TypedDict

from closeranks.core.errors import BadRecordError
from closeranks.data.building.build_spec import BuildSpec, PartCounts, PartDone, SkippedRecord
from closeranks.data.building.part_plan import BuildPart, part_ranges
from closeranks.data.building.readers.input_files import BuildInput
from closeranks.data.building.readers.input_reader import InputItem, InputReadOptions, OnBytes, read_range
from closeranks.data.building.readers.input_store import open_input_store
from closeranks.data.building.tokenizer import TokenEncoder, open_encoder
from closeranks.data.dataset_protocol import Records
from closeranks.data.shards.writer import RecordShardWriter, TokenShardWriter

_BATCH_BYTES = 4 << 20
_BATCH_ITEMS = 4096


class _Shared(TypedDict):
    """Arguments that both kinds of writers take."""

    part: int
    build: str
    shard_bytes: int


class PartBuilder:
    """Builds the parts of one build spec, one after the other; keeps tokenizer and stores open between them."""

    def __init__(self, spec: BuildSpec, on_bytes: OnBytes) -> None:
        self._spec = spec
        self._on_bytes = on_bytes
        settings = spec.settings
        self._encoder = open_encoder(settings.encoder) if settings.encoder is not None else None
        needs_utf8 = self._encoder is not None and self._encoder.needs_utf8
        self._options = InputReadOptions(settings.kind, settings.field, settings.split, needs_utf8)
        self._store = lru_cache(maxsize=4)(self._open_store)

    def build(self, part: BuildPart) -> PartDone:
        if self._encoder is None:
            with RecordShardWriter(self._spec.out, **self._shared(part)) as records:
                counts, items = self._rest(part, records.cursor)
                self._write_records(records, items, counts)
                return PartDone(part.index, records.finish(), counts)
        dtype, vocab_size = self._encoder.dtype.name, self._encoder.vocab_size
        with TokenShardWriter(self._spec.out, dtype, vocab_size=vocab_size, **self._shared(part)) as tokens:
            counts, items = self._rest(part, tokens.cursor)
            self._write_tokens(tokens, items, counts)
            return PartDone(part.index, tokens.finish(), counts)

    def _shared(self, part: BuildPart) -> _Shared:
        """The plan cuts parts of the requested size; if its estimate was wrong, shards are at most twice that."""
        shard_bytes = 2 * self._spec.settings.shard_bytes
        return {"part": part.index, "build": self._spec.identity, "shard_bytes": shard_bytes}

    def _rest(self, part: BuildPart, cursor: Any) -> tuple[PartCounts, Iterator[InputItem]]:
        """The counts over finished shards, and the items that come after them."""
        counts = PartCounts() if cursor is None else PartCounts.decode(cursor)
        return counts, islice(self._items(part), counts.num_items, None)

    def _items(self, part: BuildPart) -> Iterator[InputItem]:
        spec = self._spec
        for span in part_ranges(part, spec.extents):
            given = spec.inputs[span.input]
            files = spec.input_folders[given.root]
            yield from read_range(given, files, span, self._options, partial(self._store, span.input), self._on_bytes)

    def _open_store(self, number: int) -> Records:
        given: BuildInput = self._spec.inputs[number]
        return open_input_store(given, self._spec.input_folders[given.root], self._spec.index_folder)

    def _write_records(self, writer: RecordShardWriter, items: Iterator[InputItem], counts: PartCounts) -> None:
        for item in items:
            if item.reason:
                self._leave_out(counts, item, item.reason)
                continue
            counts.num_items += 1
            try:
                writer.append(item.value, cursor=counts.encode())
            except BadRecordError as error:
                counts.num_items -= 1
                self._leave_out(counts, item, error.what)

    def _write_tokens(self, writer: TokenShardWriter, items: Iterator[InputItem], counts: PartCounts) -> None:
        assert self._encoder is not None
        batch = _Batch(writer, self._encoder)
        for item in items:
            if item.reason:
                self._leave_out(counts, item, item.reason)
                continue
            counts.num_items += 1
            counts.text_bytes += len(item.value)
            batch.add(item.value, counts.encode())
        batch.flush()

    def _leave_out(self, counts: PartCounts, item: InputItem, reason: str) -> None:
        """Stops the build because of a bad item, or counts it as skipped."""
        skipped = SkippedRecord(item.file, item.offset, item.unit, reason)
        if self._spec.settings.on_bad == "stop":
            raise BadRecordError(
                str(skipped), "Fix or remove it, or leave such records out with --on-bad skip --overwrite."
            )
        counts.skip(skipped)


class _Batch:
    """Documents that are encoded together: a tokenizer call for each would cost more than the encoding."""

    def __init__(self, writer: TokenShardWriter, encoder: TokenEncoder) -> None:
        self._writer, self._encoder = writer, encoder
        self._texts: list[bytes] = []
        self._cursors: list[Any] = []
        self._num_bytes = 0

    def add(self, text: bytes, cursor: Any) -> None:
        if len(text) >= _BATCH_BYTES:  # a large one is encoded alone, so that it is not copied
            self.flush()
        self._texts.append(text)
        self._cursors.append(cursor)
        self._num_bytes += len(text)
        if self._num_bytes >= _BATCH_BYTES or len(self._texts) >= _BATCH_ITEMS:
            self.flush()

    def flush(self) -> None:
        if not self._texts:
            return
        encoded = self._encoder.encode(self._texts)
        ends = list(accumulate(encoded.lengths.tolist()))
        for first, last, cursor in zip([0, *ends[:-1]], ends, self._cursors, strict=True):
            self._writer.append(encoded.tokens[first:last], cursor=cursor)
        self._texts, self._cursors, self._num_bytes = [], [], 0
