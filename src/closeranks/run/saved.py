"""A saved state as it is read back: a checkpoint's, or one that was kept in memory.

[Note: rows] Where replicas train apart, what each has of its own is saved as a tensor with one dim more in front, a row
for every replica. A state of R replicas is read by any other number: replica r goes on from row ``r mod R``, a run
without replicas from row 0; a state without rows goes to every replica alike. ``RowReader`` finds them, so that whoever
restores asks for plain pieces. Invariant: with as many replicas as before, all get back what they had.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from closeranks.capture.tensors import StateTensor
from closeranks.core.errors import CheckpointError
from closeranks.core.pieces import Piece

MODEL, OPTIMIZER, OTHER, SYNC, EMA = "model", "optimizer", "other", "sync", "ema"
"""Sections of the state."""


class Saved(Protocol):
    """A saved state, read piece by piece: ``checkpoint.reader.CheckpointReader`` is one."""

    @property
    def tree(self) -> Mapping[str, Any]:
        """Everything but the tensors."""
        ...

    def shapes(self, section: str) -> Mapping[str, tuple[int, ...]]:
        """Whole shapes of what a section holds, by key."""
        ...

    def read(self, section: str, key: str, piece: Piece, dtype: torch.dtype | None = None) -> Tensor: ...

    def read_into(self, section: str, key: str, piece: Piece, out: Tensor) -> None:
        """Into memory that is there."""
        ...


@dataclass(frozen=True, slots=True)
class Row:
    """Which of the replicas this rank belongs to."""

    number: int
    count: int


class RowReader:
    """A saved state as one replica reads it, see [Note: rows]."""

    def __init__(self, saved: Saved, number: int) -> None:
        self._saved, self._number = saved, number
        self._shapes: dict[str, Mapping[str, tuple[int, ...]]] = {}

    @property
    def tree(self) -> Mapping[str, Any]:
        return self._saved.tree

    def shapes(self, section: str) -> Mapping[str, tuple[int, ...]]:
        if section not in self._shapes:
            self._shapes[section] = self._saved.shapes(section)
        return self._shapes[section]

    def read(self, section: str, key: str, piece: Piece, dtype: torch.dtype | None = None) -> Tensor:
        found = self._found(section, key, piece)
        return self._saved.read(section, key, found, dtype).view(piece.local_shape)

    def read_into(self, section: str, key: str, piece: Piece, out: Tensor) -> None:
        found = self._found(section, key, piece)
        self._saved.read_into(section, key, found, out if found is piece else out.view(found.local_shape))

    def _found(self, section: str, key: str, piece: Piece) -> Piece:
        shape = self.shapes(section).get(key, piece.shape)
        return piece if len(shape) <= len(piece.shape) else _row_of(piece, self._number % shape[0], shape[0])


def as_row(one: StateTensor, row: Row) -> StateTensor:
    """What this replica alone has, as its row of what all have, in the same memory."""
    tensor = one.tensor if one.piece.flat is not None else one.tensor.unsqueeze(0)
    return replace(one, piece=_row_of(one.piece, row.number, row.count), tensor=tensor)


def _row_of(piece: Piece, number: int, count: int) -> Piece:
    """The same piece of row ``number``."""
    return Piece(piece.name, (count, *piece.shape), (number, *piece.start), (1, *piece.size), piece.flat)


def check_alike(wanted: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse the tensors of another model."""
    if wanted.keys() != found.keys():
        odd = sorted(wanted.keys() ^ found.keys())
        raise CheckpointError(
            f"the saved model is another one: {len(odd)} tensors do not match, such as '{odd[0]}'",
            "Resume with the model the state was saved from.",
        )
    for name, shape in wanted.items():
        if shape != found[name]:
            what = f"'{name}' has shape {shape} here and {found[name]} in the saved state"
            raise CheckpointError(what, "Resume with the model the state was saved from.")
