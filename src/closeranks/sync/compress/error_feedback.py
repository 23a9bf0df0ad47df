"""Error feedback: the state that compressed reductions keep between steps, and the names under which it is saved.

Compressors send less than the gradient and add the rest to later steps. [Note: rows] Each rank has a different
remainder, so each has a row of its own: the saved tensor of a parameter has the ranks as its first dim. Only the sum of
the rows matters, since gradients are summed over ranks: with fewer or more ranks the rows are redistributed, and their
sum stays the same.

Invariant: a step's error feedback is committed only if the step was taken, so that a skipped step changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from closeranks.core.pieces import Piece
from closeranks.core.protocols import ErrorFeedbackTensor
from closeranks.sync.collectives.flat_buffer import FlatBufferSpec, ParameterSpan

RESIDUAL, OWED, FACTOR = "residual", "owed", "factor"


class StagedTensor:
    """A tensor with two values: the committed one, and the one to commit if this step is taken."""

    def __init__(self, value: Tensor) -> None:
        self.committed = value
        self._next = torch.empty_like(value)
        self._is_written = False

    def read(self) -> Tensor:
        """The latest value within a step."""
        return self._next if self._is_written else self.committed

    def write(self, value: Tensor) -> None:
        self.staged().copy_(value)

    def staged(self) -> Tensor:
        """The buffer for this step's value, for callers that compute it in place."""
        self._is_written = True
        return self._next

    def commit(self, taken: Tensor) -> None:
        """Commit or discard without a host sync: ``taken`` is 1 or 0 on the device."""
        if not self._is_written:
            return
        if taken.device.type != "cpu":
            torch.where(taken > 0, self._next, self.committed, out=self.committed)
        elif taken > 0:  # the host can read it here, and a copy is cheaper than torch.where
            self.committed.copy_(self._next)
        self._is_written = False


def error_feedback_rows(
    kind: str, flat: Tensor, spec: FlatBufferSpec, row: int, num_rows: int
) -> Iterator[ErrorFeedbackTensor]:
    """A flat tensor with the layout of a flat buffer, parameter by parameter."""
    for span in spec.spans:
        part = flat[span.offset : span.offset + span.numel]
        tensor = part.view(1, *span.piece.size) if span.is_box else part
        yield ErrorFeedbackTensor(kind, _row_piece(kind, span, row, num_rows), tensor)


def _row_piece(kind: str, span: ParameterSpan, row: int, num_rows: int) -> Piece:
    box = span.piece
    return Piece(
        f"{kind}/{box.name}",
        (num_rows, *box.shape),
        (row, *box.start),
        (1, *box.size),
        None if span.is_box else (span.begin, span.end),
    )


def rows_to_read(piece: Piece, num_saved: int) -> Sequence[Piece]:
    """The saved rows that this rank takes over, as pieces of the saved tensor: its own and, with n ranks now where
    there were more, every n-th row after it; with more ranks than before some take none."""
    num_rows, row = piece.shape[0], piece.start[0]
    saved = replace(piece, shape=(num_saved, *piece.shape[1:]))
    return [replace(saved, start=(number, *piece.start[1:])) for number in range(row, num_saved, num_rows)]
