"""How many parameters a described model has."""

from __future__ import annotations

from math import prod

from closeranks.facts.shapes.model_structure import ModelStructure, distinct_parameters


def num_params(anatomy: ModelStructure) -> int:
    return sum(prod(weight.shape) for weight in distinct_parameters(anatomy.units))
