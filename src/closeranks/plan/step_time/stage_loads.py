"""Which blocks, embedding and head does each pipeline rank work on?

Invariant: every block is on exactly one rank; the first unit is on the rank of the first stage, and the head on that of
the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from closeranks.facts.pipeline.stages import balance_stages, stage_placement
from closeranks.facts.shapes.transformer import TransformerShape, flops_per_token


@dataclass(frozen=True, slots=True)
class RankLoad:
    """The units of one pipeline rank."""

    num_blocks: int
    num_embeddings: int = 0
    num_heads: int = 0


def rank_loads(
    shape: TransformerShape, seq_len: int, pipeline: int, per_rank: int, schedule: str, *, is_balanced: bool
) -> tuple[RankLoad, ...]:
    """By pipeline rank."""
    if pipeline == 1:
        return (RankLoad(shape.num_layers, 1, 1),)
    num_stages = pipeline * per_rank
    stages = _balanced(shape, seq_len, num_stages) if is_balanced else _even(shape, num_stages)
    if schedule in ("zbv", "dualpipev"):
        places: Sequence[Sequence[int]] = stage_placement(schedule, pipeline)
    else:
        places = [range(rank, num_stages, pipeline) for rank in range(pipeline)]
    return tuple(_sum([stages[number] for number in place]) for place in places)


def _sum(loads: Sequence[RankLoad]) -> RankLoad:
    return RankLoad(
        sum(load.num_blocks for load in loads),
        sum(load.num_embeddings for load in loads),
        sum(load.num_heads for load in loads),
    )


def _even(shape: TransformerShape, num_stages: int) -> list[RankLoad]:
    """As many blocks in every stage as possible, the first stages one more; the ends come on top."""
    least, more = divmod(shape.num_layers, num_stages)
    # The ends of the model have other work to do: blocks that are left over go to the middle.
    order = sorted(range(num_stages), key=lambda number: number in (0, num_stages - 1))
    extra = set(order[:more])
    return [
        RankLoad(least + (number in extra), int(number == 0), int(number == num_stages - 1))
        for number in range(num_stages)
    ]


def _balanced(shape: TransformerShape, seq_len: int, num_stages: int) -> list[RankLoad]:
    """Cut by the cost of units, as a run of this package does."""
    head = 6.0 * shape.head_params
    block = (flops_per_token(shape, seq_len) - head) / shape.num_layers
    costs = (float(shape.dim), *[block] * shape.num_layers, 6.0 * shape.dim, head)
    found = []
    for first, last in balance_stages(costs, num_stages):
        blocks = min(last, shape.num_layers + 1) - max(first, 1)
        found.append(RankLoad(max(blocks, 0), int(first == 0), int(last == len(costs))))
    return found
