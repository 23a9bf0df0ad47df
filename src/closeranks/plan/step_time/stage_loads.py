"""Which blocks, embedding and head does each pipeline rank work on?

Invariant: every block is on exactly one rank; the first unit is on the rank of the first stage, and the head on that of
the last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from closeranks.facts.pipeline.stages import V_SHAPED, balance_stages, stage_placement
from closeranks.plan.step_time.model_figures import ModelFigures


@dataclass(frozen=True, slots=True)
class RankLoad:
    """The units of one pipeline rank."""

    num_blocks: int
    num_embeddings: int = 0
    num_heads: int = 0


def rank_loads(
    figures: ModelFigures, pipeline: int, per_rank: int, schedule: str, *, is_balanced: bool
) -> tuple[RankLoad, ...]:
    """By pipeline rank."""
    if pipeline == 1:
        return (RankLoad(figures.num_blocks, 1, 1),)
    return _rank_loads(
        figures.num_blocks,
        figures.block_flops,
        figures.last_flops,
        PipelineShape(pipeline, per_rank, schedule, is_balanced),
    )


def stage_blocks(
    figures: ModelFigures, pipeline: int, per_rank: int, schedule: str, *, is_balanced: bool
) -> tuple[tuple[int, ...], ...]:
    """By pipeline rank, the blocks of each of its stages."""
    cut = PipelineShape(pipeline, per_rank, schedule, is_balanced)
    stages = _stages(figures.num_blocks, figures.block_flops, figures.last_flops, cut)
    return tuple(tuple(stages[number].num_blocks for number in place) for place in _places(cut))


def load_counts(
    figures: ModelFigures, pipeline: int, per_rank: int, schedule: str, *, is_balanced: bool
) -> tuple[tuple[RankLoad, int], ...]:
    """The different loads, and how many pipeline ranks have each."""
    if pipeline == 1:
        return ((RankLoad(figures.num_blocks, 1, 1), 1),)
    cut = PipelineShape(pipeline, per_rank, schedule, is_balanced)
    return _load_counts(figures.num_blocks, figures.block_flops, figures.last_flops, cut)


@dataclass(frozen=True, slots=True)
class PipelineShape:
    """How a model is cut."""

    num_ranks: int
    per_rank: int
    schedule: str
    is_balanced: bool


@cache
def _rank_loads(num_blocks: int, block_flops: float, last_flops: float, cut: PipelineShape) -> tuple[RankLoad, ...]:
    stages = _stages(num_blocks, block_flops, last_flops, cut)
    return tuple(_sum([stages[number] for number in place]) for place in _places(cut))


@cache
def _stages(num_blocks: int, block_flops: float, last_flops: float, cut: PipelineShape) -> Sequence[RankLoad]:
    num_stages = cut.num_ranks * cut.per_rank
    if cut.is_balanced:
        return _balanced(num_blocks, block_flops, last_flops, num_stages)
    return _even(num_blocks, num_stages)


def _places(cut: PipelineShape) -> Sequence[Sequence[int]]:
    if cut.schedule in V_SHAPED:
        return stage_placement(cut.schedule, cut.num_ranks)
    return [range(rank, cut.num_ranks * cut.per_rank, cut.num_ranks) for rank in range(cut.num_ranks)]


@cache
def _load_counts(
    num_blocks: int, block_flops: float, last_flops: float, cut: PipelineShape
) -> tuple[tuple[RankLoad, int], ...]:
    return tuple(Counter(_rank_loads(num_blocks, block_flops, last_flops, cut)).items())


def _sum(loads: Sequence[RankLoad]) -> RankLoad:
    return RankLoad(
        sum(load.num_blocks for load in loads),
        sum(load.num_embeddings for load in loads),
        sum(load.num_heads for load in loads),
    )


def _even(num_blocks: int, num_stages: int) -> list[RankLoad]:
    """As many blocks in every stage as possible; the ends of the model come on top."""
    least, more = divmod(num_blocks, num_stages)
    # The ends of the model have other work to do: blocks that are left over go to the middle.
    order = sorted(range(num_stages), key=lambda number: number in (0, num_stages - 1))
    extra = set(order[:more])
    return [
        RankLoad(least + (number in extra), int(number == 0), int(number == num_stages - 1))
        for number in range(num_stages)
    ]


def _balanced(num_blocks: int, block_flops: float, last_flops: float, num_stages: int) -> list[RankLoad]:
    """Cut by the cost of units, as a run of this package does: the embedding, the blocks, the last norm, the head."""
    costs = (0.0, *[block_flops] * num_blocks, 0.0, last_flops)
    found = []
    for first, last in balance_stages(costs, num_stages):
        blocks = min(last, num_blocks + 1) - max(first, 1)
        found.append(RankLoad(max(blocks, 0), int(first == 0), int(last == len(costs))))
    return found
