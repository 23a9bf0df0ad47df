"""Reads the metrics of a rank: whole where they are short, else through their index (``index_writer``).

Of a long run the blocks give sums and curves of all steps; single steps are read from a sample of blocks, evenly
spread, from the first block of each session and from the last. Invariants: what the index does not cover (it is
missing, damaged or behind) is read event by event and summed up in the same way, in bounded memory, and ``note`` says
so; events that are no steps are all read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple
from zlib import crc32

from closeranks.core.errors import SetupError
from closeranks.core.events import decode
from closeranks.core.system.regular_file import open_binary
from closeranks.telemetry import formatting
from closeranks.telemetry.run_log.recorder import LINE_BYTES, lines_of, parse_line
from closeranks.telemetry.run_log.run_folder import RunFolder
from closeranks.telemetry.run_log.step_blocks import STEPS, BlockBuilder, StepBlock, parse_index_line

WHOLE_BYTES = 16 << 20
"""Metrics of this size, some 18,000 steps, are read whole."""
OTHER_BYTES = 64 << 20
"""The same for all ranks but rank 0 together; of larger files as much is read in all, indexes included."""
SAMPLES, OTHER_SAMPLES = 24, 4
"""Blocks of a long run whose steps are read one by one, up to twice as many: of rank 0, and of each other rank."""
_NOTED_BYTES = 4 << 20
_NOTED_SHARE = 0.05
"""A worker that was killed leaves its last block out of the index: more than that is said."""
_TAIL_BYTES = 1 << 16


class Stretch(NamedTuple):
    """Lines of a metrics file, in order. All lines of a stretch are to be taken before the next one."""

    block: StepBlock | None
    """None if the file is not summed up: its only stretch has all lines."""
    lines: Iterator[bytes]
    is_whole: bool
    """Whether these are all lines of the stretch; otherwise it is the kinds that were asked for, and no steps."""


class RankLog:
    """The metrics of one rank."""

    def __init__(self, path: Path, whole_bytes: int | None = None) -> None:
        self.path = path
        self.blocks: list[StepBlock] | None = None
        """All of the file, in order; None if it is read whole."""
        self.note = ""
        """What the index lacks, for people; empty if nothing much."""
        self.num_damaged = 0
        """Lines that could not be read, as far as they are counted by who reads them."""
        try:
            if path.stat().st_size > (WHOLE_BYTES if whole_bytes is None else whole_bytes):
                self._load()
        except FileNotFoundError:
            return
        except OSError as error:
            raise SetupError(f"{path} cannot be read: {error.strerror}", "Name another run folder.") from error

    @property
    def rank(self) -> int:
        number = self.path.stem.rpartition("-")[2]
        return int(number) if number.isdecimal() else 0

    def stretches(self, *kinds: str, num_samples: int | None = None) -> Iterator[Stretch]:
        """``kinds``: the lists of a block whose events are wanted besides the steps: ``others``, ``warnings``,
        ``samples``. ``num_samples``: at least so many blocks are read step by step, or all that there are
        (``SAMPLES``); 0: none but those that must be."""
        if self.blocks is None:
            yield Stretch(None, lines_of(self.path), True)
            return
        whole = _read_whole(self.blocks, SAMPLES if num_samples is None else num_samples)
        with open_binary(self.path) as file:
            for place, block in enumerate(self.blocks):
                is_whole = place in whole
                ranges = [(block.begin, block.end)] if is_whole else _ranges(block, kinds)
                yield Stretch(block, _lines(file, ranges), is_whole)

    def _load(self) -> None:
        with open_binary(self.path) as file:
            size = os.fstat(file.fileno()).st_size
            indexed, num_damaged = _indexed(self.path, file)
            blocks: list[StepBlock] = []
            end = num_read = 0
            for block in (*indexed, None):
                until = size if block is None else block.begin
                blocks += _summed_up(file, end, until)
                num_read += until - end
                if block is not None:
                    blocks.append(block)
                    end = block.end
        self.blocks = blocks
        if num_damaged or num_read > max(_NOTED_BYTES, _NOTED_SHARE * size):
            self.note = self._missing(1 - num_read / size, num_read, num_damaged)

    def _missing(self, share: float, num_read: int, num_damaged: int) -> str:
        covered = f"the index of rank {self.rank} covers {formatting.percent(share)} of its metrics"
        damaged = f" ({formatting.count(num_damaged, 'line')} of it damaged or of other metrics)" if num_damaged else ""
        return f"{covered}{damaged}: the other events, {formatting.size(num_read)}, were read one by one"


def index_path(metrics: Path) -> Path:
    return metrics.with_suffix(".index")


def other_logs(run: RunFolder, paths: Sequence[Path]) -> Iterator[RankLog]:
    """Of ranks besides rank 0, as many as can be read in bounded time."""
    room = OTHER_BYTES
    whole_bytes = OTHER_BYTES // max(1, len(paths))
    for path in paths:
        room -= _bytes_to_read(path, whole_bytes)
        if room >= 0:
            yield RankLog(path, whole_bytes)


def _bytes_to_read(path: Path, whole_bytes: int) -> int:
    try:
        size = path.stat().st_size
    except OSError:
        return 0
    if size <= whole_bytes:
        return size
    try:
        with open_binary(index_path(path)) as file:
            length = file.seek(0, os.SEEK_END)
            file.seek(max(0, length - _TAIL_BYTES))
            blocks = [block for line in file if (block := parse_index_line(line)) is not None]
    except OSError:
        return size
    return length + max(0, size - blocks[-1].end) if blocks else size


def _indexed(path: Path, metrics: BinaryIO) -> tuple[list[StepBlock], int]:
    """The blocks in an index that fit the metrics, and how many lines do not. The last line of a worker that was killed
    may be torn, which is no damage."""
    blocks: list[StepBlock] = []
    num_damaged = 0
    try:
        for line in lines_of(index_path(path)):
            block = parse_index_line(line)
            if block is None or not _fits(metrics, block):
                num_damaged += line.endswith(b"\n")
                continue
            while blocks and blocks[-1].end > block.begin:
                blocks.pop()
            blocks.append(block)
    except SetupError:  # something else than a file has its name
        num_damaged += 1
    return blocks, num_damaged


def _fits(metrics: BinaryIO, block: StepBlock) -> bool:
    """Whether the block is one of this file: it begins with a line, and ends with the line that it ended with."""
    fd = metrics.fileno()
    if block.tail_bytes > LINE_BYTES or (block.begin and os.pread(fd, 1, block.begin - 1) != b"\n"):
        return False
    return crc32(os.pread(fd, block.tail_bytes, block.end - block.tail_bytes)) == block.tail_crc


def _summed_up(file: BinaryIO, begin: int, end: int) -> Iterator[StepBlock]:
    """The blocks of what the index does not cover."""
    builder = BlockBuilder(begin)
    for line in _lines(file, [(begin, end)]):
        fields = parse_line(line) or {}
        block = builder.add(decode(fields), float(fields.get("at", 0.0)), line)
        if block is not None:
            yield block
    last = builder.finish()
    if last is not None:
        yield last


def _lines(file: BinaryIO, ranges: Sequence[tuple[int, int]]) -> Iterator[bytes]:
    for begin, end in ranges:
        file.seek(begin)
        while begin < end and (line := file.readline(min(LINE_BYTES, end - begin))):
            begin += len(line)
            yield line


def _ranges(block: StepBlock, kinds: Sequence[str]) -> list[tuple[int, int]]:
    lists: list[list[int]] = [getattr(block, kind) for kind in kinds]
    return sorted(pair for offsets in lists for pair in zip(offsets[::2], offsets[1::2], strict=True))


def _read_whole(blocks: Sequence[StepBlock], num_samples: int) -> frozenset[int]:
    """The places of the blocks that are read step by step. Samples are chosen by the number of a step, so that they are
    the same for every rank."""
    with_steps = [place for place, block in enumerate(blocks) if block.num]
    places = {place for place, one in enumerate(blocks) if one.start is not None or (one.num_phases and not one.num)}
    if num_samples and with_steps:
        stride = 1 << max(0, (len(with_steps) // num_samples).bit_length() - 1)
        places.update(place for place in with_steps if blocks[place].first // STEPS % stride == 0)
    return frozenset((*places, *with_steps[-1:], *_cut(blocks)))


def _cut(blocks: Sequence[StepBlock]) -> Iterator[int]:
    """The places of blocks of which a later session does only some steps again."""
    counted: list[int] = []
    for place, block in enumerate(blocks):
        back_to = block.start if block.start is not None else block.first - 1 if block.num else None
        if back_to is None:
            continue
        while counted and blocks[counted[-1]].first > back_to:
            counted.pop()
        if counted and blocks[counted[-1]].last > back_to:
            yield counted[-1]
        if block.num:
            counted.append(place)
