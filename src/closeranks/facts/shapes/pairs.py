"""Parameter shapes and FLOPs of the two-tower model (user and item in, click and rating out).

Invariant: ``parameter_shapes`` names exactly the parameters that ``models.pairs`` builds. The widths of the two inputs
are defined here because the synthetic data and the model must agree on them without importing each other.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PairsShape:
    """Widths of the inputs, of the hidden layer in each tower, and of the towers' output vectors."""

    user_dim: int = 16
    item_dim: int = 16
    hidden_dim: int = 64
    vector_dim: int = 32

    @property
    def joint_dim(self) -> int:
        """The width of the two heads' input: both vectors and their product."""
        return 3 * self.vector_dim


UNITS = (
    "user_tower.hidden",
    "user_tower.output",
    "item_tower.hidden",
    "item_tower.output",
    "click_head",
    "rating_head",
)
"""Its layers in the order of the module."""


def parameter_shapes(shape: PairsShape) -> dict[str, tuple[int, ...]]:
    """Name to shape, in the order of the module."""
    hidden, vector = shape.hidden_dim, shape.vector_dim
    widths = {
        "user_tower.hidden": (hidden, shape.user_dim),
        "user_tower.output": (vector, hidden),
        "item_tower.hidden": (hidden, shape.item_dim),
        "item_tower.output": (vector, hidden),
        "click_head": (1, shape.joint_dim),
        "rating_head": (1, shape.joint_dim),
    }
    shapes: dict[str, tuple[int, ...]] = {}
    for name, (num_out, num_in) in widths.items():
        shapes[f"{name}.weight"] = (num_out, num_in)
        shapes[f"{name}.bias"] = (num_out,)
    return shapes


def flops_per_sample(shape: PairsShape) -> float:
    """Forward and backward of the matrix products; the inputs need no gradient, so the first layers save a third."""
    first = shape.hidden_dim * (shape.user_dim + shape.item_dim)
    rest = 2 * shape.vector_dim * shape.hidden_dim + 2 * shape.joint_dim
    return float(4 * first + 6 * rest)
