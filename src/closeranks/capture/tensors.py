"""A rank's state as a list of tensors: which piece of which global tensor each one is, and how many ranks hold it.

Checkpoints and in-memory snapshots are both made from this list. Invariant: the tensors with ``is_saved_here``, over
all ranks, cover every global tensor, so that nothing has to be gathered and any layout can read what another one wrote.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from closeranks.core.pieces import Piece


@dataclass(frozen=True, slots=True, eq=False)
class StateTensor:
    """The part of a state tensor that this rank holds."""

    section: str
    key: str
    piece: Piece
    tensor: Tensor
    """The local tensor, of shape ``piece.local_shape``; on any device, contiguous or not."""
    is_steady: bool = True
    """Whether only the optimizer update changes it, and neither forward nor backward does."""
    holder: int = 0
    """Index of this rank among the ranks that hold this same piece."""
    num_holders: int = 1
    is_saved_here: bool = True
    """False if another rank, not among those holders, saves it."""
    per_replica: bool = False
    """Whether replicas that are not synchronized in every step hold different values of it."""
