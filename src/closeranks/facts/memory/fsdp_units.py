"""The FSDP units of ZeRO-3: what is gathered in one call, and which rows of it a rank keeps.

Units are those that ``parallel.fully_shard`` chooses; rows are divided as FSDP2 and ``torch.chunk`` divide them.
Invariant: the rows of all ranks of the shard axis make up the weight; padding to equal shards is communicated but never
kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from closeranks.facts.shapes.model_structure import ModelUnit, ParameterInfo, distinct_parameters

SMALLEST_SHARE = 1 / 100
"""As a share of the weights of a stage without blocks: smaller units are gathered with the rest of the stage, in one
call."""


@dataclass(frozen=True, slots=True)
class FsdpUnit:
    """What is gathered and reduced in one call."""

    padded_numel: int
    """Elements of all ranks' equal shards, padding rows included."""
    is_block: bool
    is_freed: bool
    """Whether it is freed after forward where the job asks for that. Not the last one, whose backward follows
    immediately, and not the rest of a stage."""


def fsdp_units(stages: Sequence[Sequence[ModelUnit]], *, tensor: int, num_shards: int) -> tuple[FsdpUnit, ...]:
    """For each stage, the units that are gathered alone, and the rest of the stage as one."""

    def padded(weights: Sequence[ParameterInfo]) -> int:
        return num_shards * sum(shard_numel(weight, tensor, num_shards) for weight in weights)

    found: list[FsdpUnit] = []
    for units in stages:
        alone = _alone(units, tensor)
        names = {unit.name for unit in alone}
        found += [FsdpUnit(padded(unit.weights), unit.is_block, unit is not alone[-1]) for unit in alone]
        rest = padded(distinct_parameters(unit for unit in units if unit.name not in names))
        if rest:
            found.append(FsdpUnit(rest, False, False))
    return tuple(found)


def _alone(units: Sequence[ModelUnit], tensor: int) -> list[ModelUnit]:
    """The units gathered alone: the blocks or, where there are none, every unit that is large enough. A tied weight is
    gathered with the rest, for both its users; a block without weights, such as an activation, is not gathered."""
    owners = Counter(weight.name for unit in units for weight in unit.weights)
    least = SMALLEST_SHARE * sum(weight.numel(tensor) for weight in distinct_parameters(units))
    has_blocks = any(unit.is_block for unit in units)
    return [
        unit
        for unit in units
        if unit.weights
        and (unit.is_block if has_blocks else unit.numel(tensor) >= least)
        and all(owners[weight.name] == 1 for weight in unit.weights)
    ]


def shard_numel(weight: ParameterInfo, tensor: int, num_shards: int, shard: int = 0) -> int:
    """Elements of a weight that a rank of the shard axis keeps: whole rows; the last ranks may have fewer or none."""
    rows = weight.rows(tensor)
    parameters = -(-rows // num_shards)
    return max(0, min(parameters, rows - parameters * shard)) * (weight.numel(tensor) // rows)
