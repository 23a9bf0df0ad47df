"""The interface of a saved state when it is read back: a checkpoint, or a snapshot in memory.

[Note: rows] With Local SGD and DiLoCo, the state that each replica has of its own is saved as a tensor with one more
dim in front, a row for every replica. A state of R replicas can be read by any other number: replica r resumes from row
``r mod R``, a run without replicas from row 0; a state without rows is read by every replica. ``ReplicaStateReader``
selects the row, so that components ask for plain pieces. Invariant: with as many replicas as before, each gets back
what it had.
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

MODEL, OPTIMIZER, OTHER, SYNC, EMA, TABLES = "model", "optimizer", "other", "sync", "ema", "tables"
"""Sections of the state."""


class SavedState(Protocol):
    """A saved state, read piece by piece: ``checkpoint.load.resharding_reader.CheckpointReader`` is one."""

    @property
    def tree(self) -> Mapping[str, Any]:
        """Everything but the tensors."""
        ...

    def shapes(self, section: str) -> Mapping[str, tuple[int, ...]]:
        """Full shapes of the tensors in a section, by key."""
        ...

    def read(self, section: str, key: str, piece: Piece, dtype: torch.dtype | None = None) -> Tensor: ...

    def read_into(self, section: str, key: str, piece: Piece, out: Tensor) -> None:
        """Read into existing memory."""
        ...


@dataclass(frozen=True, slots=True)
class ReplicaIndex:
    """The index of this rank's replica, and the number of replicas."""

    number: int
    count: int


class ReplicaStateReader:
    """A saved state as one replica reads it, see [Note: rows]."""

    def __init__(self, saved: SavedState, number: int) -> None:
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


def as_replica_row(one: StateTensor, replica: ReplicaIndex) -> StateTensor:
    """This replica's own tensor as its row of the saved tensor of all replicas; shares its memory."""
    tensor = one.tensor if one.piece.flat is not None else one.tensor.unsqueeze(0)
    return replace(one, piece=_row_of(one.piece, replica.number, replica.count), tensor=tensor)


def _row_of(piece: Piece, number: int, count: int) -> Piece:
    """The same piece of row ``number``."""
    return Piece(piece.name, (count, *piece.shape), (number, *piece.start), (1, *piece.size), piece.flat)


def check_same_shapes(wanted: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> None:
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
