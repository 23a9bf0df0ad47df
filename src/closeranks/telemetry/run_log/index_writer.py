"""Writes the index of a rank's metrics while it trains: one line for every block of steps (``step_blocks``).

Invariants: a block is written only if the metrics file has grown by exactly its lines, so that what a full disk, a
removed file or another process did leaves a gap in the index and never a wrong block; nothing in here raises. Cost:
about 4 us a step, most of it at the end of a block.
"""

from __future__ import annotations

import logging
from pathlib import Path

from closeranks.core.events import Event
from closeranks.core.system.append_file import AppendFile
from closeranks.telemetry.run_log.step_blocks import BlockBuilder, StepBlock, to_index_line

_log = logging.getLogger(__name__)


class IndexWriter:
    """Call sequence: ``add`` after each line that was written to ``metrics``; ``close`` before that file is closed."""

    def __init__(self, path: Path, metrics: AppendFile) -> None:
        self._path, self._metrics = path, metrics
        self._builder: BlockBuilder | None = None
        self._file: AppendFile | None = None
        self._has_failed = False

    def add(self, event: Event, at: float, line: bytes) -> None:
        if self._has_failed:
            return
        try:
            if self._builder is None and (size := self._metrics.num_bytes) is not None:
                self._builder = BlockBuilder(size - len(line))
            if self._builder is not None and (block := self._builder.add(event, at, line)) is not None:
                self._write(block)
        except Exception:
            self._fail()

    def close(self) -> None:
        """Write the last block, which is shorter."""
        try:
            if self._builder is not None and (block := self._builder.finish()) is not None:
                self._write(block)
        except Exception:
            self._fail()
        self._builder = None
        if self._file is not None:
            self._file.close()

    def _write(self, block: StepBlock) -> None:
        assert self._builder is not None
        if self._metrics.num_bytes != self._builder.end:
            self._builder = None
            return
        line = to_index_line(block)
        if self._file is None:
            self._file = AppendFile(self._path, _ignore)
        self._file.write(line)

    def _fail(self) -> None:
        """Without an index the metrics are read whole: nothing is lost but time."""
        self._has_failed = True
        _log.warning("%s is written no further", self._path, exc_info=True)


def _ignore(why: str) -> None:
    """What keeps the index from being written is reported for the metrics beside it."""
