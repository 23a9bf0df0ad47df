"""Arithmetic of the two-tower model: counted by hand once."""

from __future__ import annotations

from math import prod

from closeranks.facts.shapes.pairs import PairsShape, flops_per_sample, parameter_shapes


def test_counts_of_a_small_shape() -> None:
    shape = PairsShape(user_dim=2, item_dim=3, hidden_dim=4, vector_dim=5)
    assert parameter_shapes(shape)["item_tower.hidden.weight"] == (4, 3)
    assert sum(map(prod, parameter_shapes(shape).values())) == (8 + 4 + 20 + 5) + (12 + 4 + 20 + 5) + 2 * (15 + 1)
    assert flops_per_sample(shape) == 4 * (8 + 12) + 6 * (20 + 20 + 30)
