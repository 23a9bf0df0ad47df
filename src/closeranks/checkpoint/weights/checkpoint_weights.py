"""Reads weights from one of our own checkpoints.

Only its model, whatever else it holds and whatever layout saved it; if a moving average of the weights was kept
(``optim.ema``), the average. Invariant: every chunk that contributes to what is read was compared with its checksum.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from closeranks.checkpoint.load.resharding_reader import CheckpointReader, open_newest
from closeranks.core.pieces import Piece

MODEL, EMA = "model", "ema"


class CheckpointWeights:
    """The model of a checkpoint (``protocol.Weights``)."""

    def __init__(self, reader: CheckpointReader) -> None:
        self._reader = reader
        self._averaged = reader.shapes(EMA).keys()
        note = "The weights are the moving average that optim.ema kept; closeranks ckpt convert --to dcp exports both."
        self.notes: tuple[str, ...] = (note,) if self._averaged else ()

    @property
    def path(self) -> str:
        return self._reader.path

    @property
    def tree(self) -> Mapping[str, Any]:
        """The non-tensor part of the state."""
        return self._reader.tree

    def names(self) -> dict[str, tuple[int, ...]]:
        return self._reader.shapes(MODEL)

    def dtype(self, name: str) -> torch.dtype:
        return self._reader.dtype(self._section(name), name)

    def read(self, name: str, piece: Piece, dtype: torch.dtype | None = None) -> Tensor:
        return self._reader.read(self._section(name), name, piece, dtype)

    def _section(self, name: str) -> str:
        return EMA if name in self._averaged else MODEL


def open_checkpoint_weights(place: str) -> CheckpointWeights:
    """The newest valid checkpoint at a run's folder, a folder of checkpoints, one of them, or a URL of those."""
    return CheckpointWeights(open_newest(place))
