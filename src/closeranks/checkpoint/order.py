"""What is a writer asked to save, under which settings, and what does it answer?

Orders go from a trainer to its writer, reports come back; both cross a process boundary as plain JSON values.
Invariant: ``decode(encode(x)) == x`` for each of them, floats included. Imports no torch and no pydantic: the writer
starts in a fraction of a second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal

from closeranks.checkpoint.manifest import Chunk
from closeranks.core.pieces import Piece

if TYPE_CHECKING:
    from closeranks.checkpoint.config import CheckpointConfig

Tier = Literal["primary", "remote"]
Kind = Literal["written", "released", "committed", "failed", "collected"]


@dataclass(frozen=True, slots=True)
class Order:
    """One save, as one rank sees it."""

    save: str
    """Which try this is, alike on all ranks: parts of different tries never make one checkpoint."""
    folder: str
    """Of the checkpoint, in the storage's root: ``manifest.folder_name(step, part)``."""
    step: int
    rank: int
    num_ranks: int
    layout: str
    chunks: tuple[Chunk, ...]
    """In the order their bytes lie in shared memory: back to back, without gaps."""
    is_full: bool
    """Write all, refer to nothing."""
    to_remote: bool
    """Whether the second place gets it too; without meaning where the settings name none."""
    tree: Mapping[str, Any] | None
    """Rank 0 only: everything of the state that is no tensor."""
    metric: float | None
    begin: int = 0
    """Where the first chunk lies in the memory."""

    @property
    def offsets(self) -> tuple[int, ...]:
        """Of each chunk's first byte."""
        return tuple(accumulate((chunk.num_bytes for chunk in self.chunks[:-1]), initial=self.begin))[
            : len(self.chunks)
        ]

    @property
    def num_bytes(self) -> int:
        return sum(chunk.num_bytes for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class Settings:
    """What stays the same for all saves of a writer."""

    place: str
    """The primary storage: a folder or an fsspec URL."""
    remote: str
    """The second, durable one; empty: none."""
    keep_last: int
    keep_every: int
    keep_best: int
    read_back: bool
    timeout_s: float
    nice: int

    @classmethod
    def from_config(cls, config: CheckpointConfig, place: str) -> Settings:
        """``place``: where the run's checkpoints go when the config names no folder of its own."""
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
class Report:
    """What became of a save, as far as it has come.

    written     this rank's data is durable in ``tier`` (``path``: its file, ``num_bytes``, ``seconds`` since the order
                began there)
    released    the buffer is free for the next save; once for each order, whatever else happens
    committed   rank 0: the checkpoint counts in ``tier`` (``path``, ``num_bytes`` of the state, ``seconds``)
    failed      it will not count in ``tier``; ``what`` says why in one sentence
    collected   rank 0: ``names`` of the checkpoints that retention removed from ``tier``; ``what`` says what it could
                not remove, which fails no save
    """

    kind: Kind
    save: str
    step: int
    tier: Tier = "primary"
    what: str = ""
    path: str = ""
    num_bytes: int = 0
    seconds: float = 0.0
    names: tuple[str, ...] = ()


def session_of(save: str) -> str:
    """What all saves of one session have in common: in it, a step has one state."""
    return save.rpartition("-")[0]


def encode_order(order: Order) -> dict[str, Any]:
    return {
        "save": order.save,
        "folder": order.folder,
        "step": order.step,
        "rank": order.rank,
        "num_ranks": order.num_ranks,
        "layout": order.layout,
        "chunks": [_chunk_row(chunk) for chunk in order.chunks],
        "is_full": order.is_full,
        "to_remote": order.to_remote,
        "tree": None if order.tree is None else dict(order.tree),
        "metric": order.metric,
        "begin": order.begin,
    }


def decode_order(values: Mapping[str, Any]) -> Order:
    return Order(**{**values, "chunks": tuple(_chunk(row) for row in values["chunks"])})


def encode_settings(settings: Settings) -> dict[str, Any]:
    return asdict(settings)


def decode_settings(values: Mapping[str, Any]) -> Settings:
    return Settings(**values)


def encode_report(report: Report) -> dict[str, Any]:
    return {**asdict(report), "names": list(report.names)}


def decode_report(values: Mapping[str, Any]) -> Report:
    return Report(**{**values, "names": tuple(values["names"])})


def _chunk_row(chunk: Chunk) -> list[Any]:
    piece = chunk.piece
    flat = None if piece.flat is None else list(piece.flat)
    where = [list(piece.shape), list(piece.start), list(piece.size), flat]
    return [chunk.section, chunk.key, chunk.dtype, *where, chunk.num_bytes, chunk.crc32c]


def _chunk(row: Sequence[Any]) -> Chunk:
    section, key, dtype, shape, start, size, flat, num_bytes, crc = row
    piece = Piece(key, tuple(shape), tuple(start), tuple(size), None if flat is None else (flat[0], flat[1]))
    return Chunk(section, key, dtype, piece, num_bytes, crc)
