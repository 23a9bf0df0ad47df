"""The messages between a trainer and its writer process: save tasks, settings and reports.

Save tasks go from a trainer to its writer, reports come back; both cross a process boundary as plain JSON values.
Invariant: ``decode(encode(x)) == x`` for each of them, floats included. Imports no torch and no pydantic, so that the
writer starts in a fraction of a second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal

from closeranks.checkpoint.format.manifest import Chunk
from closeranks.core.pieces import Piece

if TYPE_CHECKING:
    from closeranks.checkpoint.config import CheckpointConfig

StorageTier = Literal["primary", "remote"]
SaveReportKind = Literal["written", "released", "committed", "failed", "collected"]


@dataclass(frozen=True, slots=True)
class SaveTask:
    """One save, as one rank sees it."""

    save: str
    """Identifies the attempt, the same on all ranks: parts of different attempts never make one checkpoint."""
    folder: str
    """The checkpoint's folder in the storage's root: ``manifest.folder_name(step, part)``."""
    step: int
    rank: int
    num_ranks: int
    layout: str
    chunks: tuple[Chunk, ...]
    """In the order of their bytes in shared memory: back to back, without gaps."""
    is_full: bool
    """Write everything, without references to earlier checkpoints."""
    to_remote: bool
    """Whether to save to the second tier too; ignored if the settings name none."""
    tree: Mapping[str, Any] | None
    """Rank 0 only: the non-tensor part of the state."""
    metric: float | None
    data_offset: int = 0
    """Offset of the first chunk in the shared memory."""

    @property
    def offsets(self) -> tuple[int, ...]:
        """Offset of each chunk's first byte."""
        return tuple(accumulate((chunk.num_bytes for chunk in self.chunks[:-1]), initial=self.data_offset))[
            : len(self.chunks)
        ]

    @property
    def num_bytes(self) -> int:
        return sum(chunk.num_bytes for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class SaveSettings:
    """Settings that are the same for all saves of a writer."""

    place: str
    """The primary storage: a folder or an fsspec URL."""
    remote: str
    """The second, durable storage; empty: none."""
    keep_last: int
    keep_every: int
    keep_best: int
    read_back: bool
    timeout_s: float
    nice: int

    @classmethod
    def from_config(cls, config: CheckpointConfig, place: str) -> SaveSettings:
        """``place``: where the run's checkpoints go if the config names no folder."""
        return cls(
            place=config.folder or place,
            remote=config.remote,
            keep_last=config.keep_last,
            keep_every=config.keep_every,
            keep_best=config.keep_best,
            read_back=config.read_back,
            timeout_s=config.timeout_s,
            nice=config.nice,
        )


@dataclass(frozen=True, slots=True)
class SaveReport:
    """Progress or result of a save.

    written     this rank's data is durable in ``tier`` (``path``: its file, ``num_bytes``, ``seconds`` since the save
                began there)
    released    the buffer is free for the next save; exactly once for each save, whatever else happens
    committed   rank 0: the checkpoint is committed in ``tier`` (``path``, ``num_bytes`` of the state, ``seconds``)
    failed      it will not be committed in ``tier``; ``what`` says why in one sentence
    collected   rank 0: ``names`` of the checkpoints that retention removed from ``tier``; ``what`` says what it could
                not remove, which does not fail the save
    """

    kind: SaveReportKind
    save: str
    step: int
    tier: StorageTier = "primary"
    what: str = ""
    path: str = ""
    num_bytes: int = 0
    seconds: float = 0.0
    names: tuple[str, ...] = ()


def session_token(save: str) -> str:
    """The token shared by all saves of a session; within a session, a step has one state."""
    return save.rpartition("-")[0]


def encode_save_task(task: SaveTask) -> dict[str, Any]:
    return {
        "save": task.save,
        "folder": task.folder,
        "step": task.step,
        "rank": task.rank,
        "num_ranks": task.num_ranks,
        "layout": task.layout,
        "chunks": [_chunk_row(chunk) for chunk in task.chunks],
        "is_full": task.is_full,
        "to_remote": task.to_remote,
        "tree": None if task.tree is None else dict(task.tree),
        "metric": task.metric,
        "data_offset": task.data_offset,
    }


def decode_save_task(values: Mapping[str, Any]) -> SaveTask:
    return SaveTask(**{**values, "chunks": tuple(_chunk(row) for row in values["chunks"])})


def encode_settings(settings: SaveSettings) -> dict[str, Any]:
    return asdict(settings)


def decode_settings(values: Mapping[str, Any]) -> SaveSettings:
    return SaveSettings(**values)


def encode_report(report: SaveReport) -> dict[str, Any]:
    return {**asdict(report), "names": list(report.names)}


def decode_report(values: Mapping[str, Any]) -> SaveReport:
    return SaveReport(**{**values, "names": tuple(values["names"])})


def _chunk_row(chunk: Chunk) -> list[Any]:
    piece = chunk.piece
    flat = None if piece.flat is None else list(piece.flat)
    where = [list(piece.shape), list(piece.start), list(piece.size), flat]
    return [chunk.section, chunk.key, chunk.dtype, *where, chunk.num_bytes, chunk.crc32c]


def _chunk(row: Sequence[Any]) -> Chunk:
    section, key, dtype, shape, start, size, flat, num_bytes, crc = row
    piece = Piece(key, tuple(shape), tuple(start), tuple(size), None if flat is None else (flat[0], flat[1]))
    return Chunk(section, key, dtype, piece, num_bytes, crc)
