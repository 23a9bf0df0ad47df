"""How many parameters a described model has."""

from __future__ import annotations

from math import prod

from closeranks.facts.anatomy import Anatomy, distinct


def num_params(anatomy: Anatomy) -> int:
    return sum(prod(weight.shape) for weight in distinct(anatomy.units))
