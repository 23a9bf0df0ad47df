"""Parameter shapes and FLOPs of the small convnet for 8x8 digits.

Invariant: ``parameter_shapes`` names exactly the parameters that ``models.digits`` builds.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, slots=True)
class DigitsShape:
    """Two 3x3 convolutions (the second twice as wide), a halving of the image, a hidden layer, ten answers."""

    channels: int = 16
    hidden_dim: int = 64
    image_size: int = 8
    num_classes: int = 10

    @property
    def flat_dim(self) -> int:
        """Inputs of the hidden layer: the wider channels over the halved image."""
        return 2 * self.channels * (self.image_size // 2) ** 2


UNITS = ("stem", "body", "hidden", "output")
"""Its modules in the order they run."""


def parameter_shapes(shape: DigitsShape) -> dict[str, tuple[int, ...]]:
    """Name to shape, in the order of the module. Convolutions carry no bias: the norm behind them has one."""
    narrow, wide = shape.channels, 2 * shape.channels
    return {
        "stem.conv.weight": (narrow, 1, 3, 3),
        "stem.norm.weight": (narrow,),
        "stem.norm.bias": (narrow,),
        "body.conv.weight": (wide, narrow, 3, 3),
        "body.norm.weight": (wide,),
        "body.norm.bias": (wide,),
        "hidden.weight": (shape.hidden_dim, shape.flat_dim),
        "hidden.bias": (shape.hidden_dim,),
        "output.weight": (shape.num_classes, shape.hidden_dim),
        "output.bias": (shape.num_classes,),
    }


def num_statistics(shape: DigitsShape) -> int:
    """Running means and variances of its two batch norms."""
    return 2 * 3 * shape.channels


def flops_per_sample(shape: DigitsShape) -> float:
    """Forward and backward of the products; the image needs no gradient, so the stem saves a third."""
    shapes = parameter_shapes(shape)
    pixels = shape.image_size**2
    stem = prod(shapes["stem.conv.weight"]) * pixels
    body = prod(shapes["body.conv.weight"]) * pixels
    dense = prod(shapes["hidden.weight"]) + prod(shapes["output.weight"])
    return float(4 * stem + 6 * (body + dense))
