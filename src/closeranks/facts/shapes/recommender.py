"""Parameter shapes and FLOPs of the recommender: embedding tables, two MLPs, dot products between features.

Invariant: ``parameter_shapes`` names exactly the parameters that ``models.recommender`` builds. The defaults of the
inputs' sizes are defined here because the synthetic clicks and the model must agree on them without importing each
other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class RecommenderShape:
    """Sizes of the inputs, of a table, and widths of the hidden layers of both MLPs."""

    num_dense: int = 8
    features: int = 6
    rows: int = 1000
    dim: int = 16
    bottom: tuple[int, ...] = (32,)
    top: tuple[int, ...] = (64, 32)

    @property
    def num_dots(self) -> int:
        """Pairs of distinct vectors among the features' and the one of the dense inputs."""
        return (self.features + 1) * self.features // 2

    @property
    def bottom_widths(self) -> tuple[int, ...]:
        return (self.num_dense, *self.bottom, self.dim)

    @property
    def top_widths(self) -> tuple[int, ...]:
        return (self.dim + self.num_dots, *self.top, 1)


def units(shape: RecommenderShape) -> tuple[str, ...]:
    """Its modules in the order they run."""
    return ("bottom", *(f"tables.{number}" for number in range(shape.features)), "top")


def parameter_shapes(shape: RecommenderShape) -> dict[str, tuple[int, ...]]:
    """Name to shape, in the order of the module."""
    tables = {f"tables.{number}.weight": (shape.rows, shape.dim) for number in range(shape.features)}
    return _mlp("bottom", shape.bottom_widths) | tables | _mlp("top", shape.top_widths)


def _mlp(name: str, widths: Sequence[int]) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for number, (num_in, num_out) in enumerate(pairwise(widths)):
        shapes[f"{name}.{number}.weight"] = (num_out, num_in)
        shapes[f"{name}.{number}.bias"] = (num_out,)
    return shapes


def flops_per_sample(shape: RecommenderShape) -> float:
    """Forward and backward of the matrix products; the dense inputs need no gradient, so the first layer saves a third.
    Reading rows and adding up their gradients are no products."""
    bottom = [num_in * num_out for num_in, num_out in pairwise(shape.bottom_widths)]
    top = sum(num_in * num_out for num_in, num_out in pairwise(shape.top_widths))
    dots = (shape.features + 1) ** 2 * shape.dim
    return float(4 * bottom[0] + 6 * (sum(bottom[1:]) + top + dots))
