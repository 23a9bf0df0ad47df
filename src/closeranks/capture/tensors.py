"""A rank's state as a list of tensors: which piece of which global tensor each one is, and who else holds it.

Checkpoints and the copies in memory are both made from this list. Invariant: the tensors of all ranks that are ``ours``
cover every global tensor, so that nothing has to be gathered and any layout can read what another one wrote.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from closeranks.core.pieces import Piece


@dataclass(frozen=True, slots=True, eq=False)
class StateTensor:
    """A tensor of the state, as far as this rank holds it."""

    section: str
    key: str
    piece: Piece
    tensor: Tensor
    """Local, of shape ``piece.local_shape``; on any device, contiguous or not."""
    is_steady: bool = True
    """Whether only the optimizer's update changes it: neither forward nor backward do."""
    holder: int = 0
    """Which of the ranks that hold this very piece this one is."""
    num_holders: int = 1
    is_ours: bool = True
    """False where another rank, not among those holders, saves it."""
    per_replica: bool = False
    """Whether replicas that are not synchronised in every step hold different values of it."""
