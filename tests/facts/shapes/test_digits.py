"""Arithmetic of the digits convnet: counted by hand once."""

from __future__ import annotations

from math import prod

from closeranks.facts.shapes.digits import DigitsShape, flops_per_sample, num_statistics, parameter_shapes


def test_counts_of_a_small_shape() -> None:
    shape = DigitsShape(channels=2, hidden_dim=3)
    assert shape.flat_dim == 64
    assert parameter_shapes(shape)["hidden.weight"] == (3, 64)
    assert sum(map(prod, parameter_shapes(shape).values())) == 18 + 4 + 72 + 8 + 195 + 40
    assert flops_per_sample(shape) == 4 * 18 * 64 + 6 * (72 * 64 + 192 + 30)
    assert num_statistics(shape) == 2 * 2 + 2 * 4
