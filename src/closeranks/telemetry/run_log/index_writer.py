"""Writes the index of a rank's metrics while it trains: one line for every block of steps (``step_blocks``).

Invariants: a block is written only if the metrics file has grown by exactly its lines, so that what a full disk, a
removed file or another process did leaves a gap in the index and never a wrong block; nothing in here raises. Cost:
about 4 us a step, most of it at the end of a block.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from closeranks.core.events import Event
from closeranks.core.system.append_file import AppendFile
from closeranks.telemetry.run_log.step_blocks import BlockBuilder, StepBlock, to_index_line

_MOST_PENDING = 64
"""Events that wait to be summed up, all at once."""
_log = logging.getLogger(__name__)


class IndexWriter:
    """Call sequence: ``add`` after each line that was written to ``metrics``; ``close`` before that file is closed."""

    def __init__(self, path: Path, metrics: AppendFile) -> None:
        self._path, self._metrics = path, metrics
        self._pending: list[tuple[Event, float, bytes]] = []
        self._end: int | None = None
        """How long the metrics are, with these lines; None before the first."""
        self._builder: BlockBuilder | None = None
        self._file: AppendFile | None = None
        self._has_failed = False

    def add(self, event: Event, at: float, line: bytes) -> None:
        if self._has_failed:
            return
        try:
            self._end = self._metrics.num_bytes if self._end is None else self._end + len(line)
            if self._end is not None:
                self._pending.append((event, at, line))
            if len(self._pending) >= _MOST_PENDING:
                self._write(self._take_pending())
        except Exception:
            self._fail()

    def close(self) -> None:
        """Write the last block, which is shorter."""
        try:
            blocks = self._take_pending()
            last = self._builder.finish() if self._builder is not None else None
            self._write([*blocks, last] if last is not None else blocks)
        except Exception:
            self._fail()
        if self._file is not None:
            self._file.close()

    def _take_pending(self) -> list[StepBlock]:
        if self._builder is None and self._end is not None:
            self._builder = BlockBuilder(self._end - sum(len(line) for _, _, line in self._pending))
        blocks = []
        if self._builder is not None:
            blocks = [block for one in self._pending if (block := self._builder.add(*one)) is not None]
        self._pending.clear()
        return blocks

    def _write(self, blocks: Sequence[StepBlock]) -> None:
        if blocks and self._metrics.num_bytes != self._end:
            self._builder = self._end = None
            return
        for block in blocks:
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
