"""What does ZeRO-3 gather in one call, and which rows of it does a rank keep?

Units are those that ``parallel.zero`` chooses, rows are cut as FSDP2 and ``torch.chunk`` cut them. Invariant: the rows
of all ranks of the shard axis make up the weight; padding to equal shares travels and is never kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from closeranks.facts.anatomy import Unit, Weight, distinct
from closeranks.facts.layout import Layout
from closeranks.facts.mesh import Mesh

SMALLEST_SHARE = 1 / 100
"""Of the weights of a stage without blocks: what is smaller is gathered with the rest of the stage, in one call."""


@dataclass(frozen=True, slots=True)
class ShardedUnit:
    """What is gathered and reduced in one call."""

    padded: int
    """Elements of all ranks' equal shares, rows that pad them included."""
    is_block: bool
    is_freed: bool
    """Whether it is freed after forward where that is wished for. Not the last one, whose backward follows at once,
    and not the rest of a stage."""


def sharded_units(stages: Sequence[Sequence[Unit]], layout: Layout) -> tuple[ShardedUnit, ...]:
    """Of the units of each stage those that are gathered alone, and the rest of the stage together."""
    found: list[ShardedUnit] = []
    for units in stages:
        alone = _alone(units, layout.tensor)
        names = {unit.name for unit in alone}
        found += [ShardedUnit(_padded(unit.weights, layout), unit.is_block, unit is not alone[-1]) for unit in alone]
        rest = _padded(distinct(unit for unit in units if unit.name not in names), layout)
        if rest:
            found.append(ShardedUnit(rest, False, False))
    return tuple(found)


def _alone(units: Sequence[Unit], tensor: int) -> list[Unit]:
    """The blocks, or where there are none whatever is large enough. A tied weight is gathered with the rest, for both
    its users."""
    owners = Counter(weight.name for unit in units for weight in unit.weights)
    least = SMALLEST_SHARE * sum(weight.numel(tensor) for weight in distinct(units))
    has_blocks = any(unit.is_block for unit in units)
    return [
        unit
        for unit in units
        if (unit.is_block if has_blocks else unit.numel(tensor) >= least)
        and all(owners[weight.name] == 1 for weight in unit.weights)
    ]


def _padded(weights: Sequence[Weight], layout: Layout) -> int:
    return sum(rows_of(weight, layout) for weight in weights) * Mesh(layout).sizes[2]


def rows_of(weight: Weight, layout: Layout, shard: int = 0) -> int:
    """Elements of a weight that a rank of the shard axis keeps: whole rows; the last ranks come short or empty."""
    rows = weight.rows(layout.tensor)
    share = -(-rows // Mesh(layout).sizes[2])
    return max(0, min(share, rows - share * shard)) * (weight.numel(layout.tensor) // rows)
