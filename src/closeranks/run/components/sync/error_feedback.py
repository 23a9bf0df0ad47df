"""Restores the error feedback of compression, also on another number of ranks or in another layout.

[Note: nothing owed is lost] Only the sum of all ranks' residuals matters, so the saved rows are redistributed: rank r
of n takes rows r, r + n, and so on. The residual of the owner of a sum goes to the rank that owns the sum now; if sums
are no longer compressed by an owner, the first row takes it. Factors of PowerSGD are restored if their matrix is
sharded as before, else they start anew. Invariant: with the same ranks and layout, every rank gets back what it had,
bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from closeranks.core.pieces import Piece
from closeranks.core.protocols import ErrorFeedbackTensor
from closeranks.run.state.saved_state import SavedState
from closeranks.sync.compress.error_feedback import OWED, RESIDUAL, rows_to_read


def restore_error_feedback(
    tensors: Sequence[ErrorFeedbackTensor], saved: SavedState, section: str, *, recompresses_sums: bool
) -> None:
    """What a state does not hold, or holds with another shape, starts as in a fresh run. ``recompresses_sums``: whether
    sums are compressed by their owners, here or on any rank."""
    shapes = saved.shapes(section)
    for one in tensors:
        key, own = one.piece.name, one.piece.shape
        if one.kind == RESIDUAL:
            one.tensor.zero_()
            for piece in _rows(one, shapes):
                _add(one.tensor, saved.read(section, key, piece))
            owed = key.replace(f"{RESIDUAL}/", f"{OWED}/", 1)
            if one.piece.start[0] == 0 and not recompresses_sums and shapes.get(owed, ())[1:] == own[1:]:
                _add(one.tensor, saved.read(section, owed, replace(one.piece, name=owed, shape=(1, *own[1:]))))
        elif shapes.get(key) == own:
            saved.read_into(section, key, one.piece, one.tensor)
        elif one.kind == OWED:
            one.tensor.zero_()


def _rows(one: ErrorFeedbackTensor, shapes: Mapping[str, tuple[int, ...]]) -> Sequence[Piece]:
    shape = shapes.get(one.piece.name, ())
    return rows_to_read(one.piece, shape[0]) if shape[1:] == one.piece.shape[1:] and shape else ()


def _add(tensor: Tensor, found: Tensor) -> None:
    tensor.add_(found.to(tensor.device, tensor.dtype).view(tensor.shape))
