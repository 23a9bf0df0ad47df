"""Memory per rank under a layout: weights, gradients, optimizer state, and what a reducer needs beside them.

The tensor axis shards weights, the pipeline axis divides units into stages, and ZeRO shards the rest over the shard
axis: in flat buckets up to stage 2, row by row for each weight at stage 3. Invariant: weights and optimizer state add
up over the ranks to the whole model, apart from replicas and tied copies. What of gradients and buffers is there at the
peak of a step is up to ``facts.memory.peak``; for activations see ``facts.memory.activations``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from closeranks.facts.layout import Layout
from closeranks.facts.memory.fsdp_units import FsdpUnit, fsdp_units, shard_numel
from closeranks.facts.memory.peak import ReducerBytes, WeightBytes
from closeranks.facts.memory.state_bytes import (
    OptimizerName,
    Precision,
    element_bytes,
    num_optimizer_states,
)
from closeranks.facts.mesh import Mesh
from closeranks.facts.pipeline.stages import balance_stages, stage_placement
from closeranks.facts.shapes.model_structure import ModelStructure, ModelUnit, ParameterInfo, distinct_parameters

Hold = Literal["shards", "step"]


@dataclass(frozen=True, slots=True)
class StageUnits:
    """One of a pipeline rank's stages."""

    number: int
    units: tuple[ModelUnit, ...]


@dataclass(frozen=True, slots=True)
class BucketItem:
    """A weight as input of a bucket plan."""

    name: str
    numel: int
    stage: int
    """Index among the rank's own stages; ``SEVERAL_STAGES`` for a tied weight that is in more than one of them."""
    reduce_axes: tuple[str, ...]
    """Axes other than data over which its gradient must also be summed."""


SEVERAL_STAGES = -1


@dataclass(frozen=True, slots=True)
class BucketSize:
    numel: int
    """Includes the padding that aligns members and makes slices equal."""
    reduce_axes: tuple[str, ...] = ()


class BucketPlanner(Protocol):
    """Plans which gradients are reduced together; the reducers' own plan, so that the prediction matches the run."""

    def __call__(self, items: Sequence[BucketItem], *, num_shards: int, element_bytes: int) -> Sequence[BucketSize]:
        """``num_shards`` is 0 where buckets are not sliced at all (ZeRO 0)."""
        ...


def plan_one_bucket(items: Sequence[BucketItem], *, num_shards: int, element_bytes: int) -> Sequence[BucketSize]:
    """The simplest plan: one bucket for all gradients that are summed over the same axes."""
    totals = {
        sums: sum(item.numel for item in items if item.reduce_axes == sums)
        for sums in {item.reduce_axes for item in items}
    }
    return [BucketSize(_round_up(total, max(num_shards, 1)), sums) for sums, total in sorted(totals.items())]


@dataclass(frozen=True, slots=True)
class CostSettings:
    """The settings besides model and layout that determine how much a rank holds and sends."""

    precision: Precision = "float32"
    optimizer: OptimizerName = "adamw"
    has_average: bool = False
    """Whether a moving average of the weights is kept besides the optimizer's state."""
    hold: Literal["auto", "shards", "step"] = "auto"
    prefetch: int = 1
    """Units whose weights ZeRO-3 gathers ahead."""
    num_micro: int = 1
    """Micro-batches per step on the data rank that has the most."""
    buckets: BucketPlanner = plan_one_bucket
    num_metrics: int = 0
    """Sums in the vote's all-reduce besides the loss."""
    num_trained: int = 0
    """Parameters for which the vote reports whether they had a gradient."""
    num_statistics: int = 0
    """Running means and variances of batch norms that are averaged over the data ranks once per step."""

    @property
    def num_state_tensors(self) -> int:
        """State tensors of a parameter's size that are kept for it, besides its gradient."""
        return num_optimizer_states(self.optimizer) + self.has_average


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes that one rank keeps from step to step, and the gradients of a step."""

    parameters: int
    gradients: int
    """Once the step's last backward is done."""
    optimizer: int
    padding: int = 0
    """Of buckets of weights."""

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.padding


def resolve_hold(hold: str, layout: Layout) -> Hold:
    """Resolves ``auto``: a pipeline runs a stage once per micro-batch, so gathering every time would cost too much."""
    if hold in ("shards", "step"):
        return "step" if hold == "step" else "shards"
    return "step" if layout.pipeline > 1 else "shards"


def stages_per_rank(structure: ModelStructure, layout: Layout) -> tuple[tuple[StageUnits, ...], ...]:
    """The stages of every pipeline rank."""
    if layout.pipeline == 1:
        return ((StageUnits(0, structure.units),),)
    ranges = balance_stages(tuple(unit.cost for unit in structure.units), layout.num_stages)
    return tuple(
        tuple(StageUnits(number, structure.units[slice(*ranges[number])]) for number in own)
        for own in stage_placement(layout.schedule, layout.pipeline)
    )


@dataclass(frozen=True, slots=True)
class RankParameters:
    """The weights of one pipeline rank, and the buckets in which their gradients are reduced."""

    stages: tuple[StageUnits, ...]
    weights: tuple[ParameterInfo, ...]
    """A tied weight is listed once."""
    items: tuple[BucketItem, ...]
    buckets: tuple[BucketSize, ...]
    """For ZeRO 0 to 2; empty where gradients stay where autograd put them."""
    units: tuple[FsdpUnit, ...] = ()
    """For ZeRO 3: what is gathered in one call."""

    @property
    def numel(self) -> int:
        return sum(item.numel for item in self.items)


def rank_parameters(
    stages: tuple[StageUnits, ...], shared: Collection[str], layout: Layout, settings: CostSettings
) -> RankParameters:
    """``shared``: the weights of which other pipeline ranks hold a copy (``tied_across_ranks``)."""
    items = _items(stages, shared, layout.tensor)
    weights = distinct_parameters(unit for stage in stages for unit in stage.units)
    num_shards = Mesh(layout).sizes[2] if layout.zero else 0
    if layout.zero == 3:
        units = fsdp_units([stage.units for stage in stages], tensor=layout.tensor, num_shards=num_shards)
        return RankParameters(stages, weights, items, (), units)
    if layout.data == 1 and layout.zero == 0:
        return RankParameters(stages, weights, items, ())
    plan = settings.buckets(items, num_shards=num_shards, element_bytes=element_bytes(settings.precision).state)
    return RankParameters(stages, weights, items, tuple(plan))


def _items(stages: Sequence[StageUnits], shared: Collection[str], tensor: int) -> tuple[BucketItem, ...]:
    items: dict[str, BucketItem] = {}
    for number, stage in enumerate(stages):
        for weight in distinct_parameters(stage.units):
            if weight.name in items:
                items[weight.name] = replace(items[weight.name], stage=SEVERAL_STAGES)
                continue
            sums = ("tensor",) if weight.is_partial and tensor > 1 else ()
            ends = ("pipeline",) if weight.name in shared else ()
            items[weight.name] = BucketItem(weight.name, weight.numel(tensor), number, sums + ends)
    return tuple(items.values())


def tied_across_ranks(stages_by_rank: Sequence[Sequence[StageUnits]]) -> frozenset[str]:
    """Weights that more than one pipeline rank holds: tied weights whose users are on different ranks."""
    found: Counter[str] = Counter()
    for stages in stages_by_rank:
        found.update({weight.name for stage in stages for unit in stage.units for weight in unit.weights})
    return frozenset(name for name, count in found.items() if count > 1)


def rank_memory(parameters: RankParameters, layout: Layout, settings: CostSettings, shard: int = 0) -> RankMemory:
    """The memory of a rank with these weights at coordinate ``shard`` of the shard axis. The first holds the most:
    where rows do not divide evenly the last ranks have fewer. Slices of buckets are equal, padding included."""
    width, num_shards = element_bytes(settings.precision).state, Mesh(layout).sizes[2]
    whole = parameters.numel * width
    if layout.zero == 0:
        return RankMemory(whole, whole, whole * settings.num_state_tensors)
    if layout.zero == 3:
        # A tied weight of two stages is sharded in each of them.
        held = (weight for stage in parameters.stages for weight in distinct_parameters(stage.units))
        own = sum(shard_numel(weight, layout.tensor, num_shards, shard) for weight in held) * width
        return RankMemory(own, own, own * settings.num_state_tensors)
    padded = sum(bucket.numel for bucket in parameters.buckets) * width
    own = padded // num_shards
    return RankMemory(
        whole, whole if layout.zero == 1 else own, own * settings.num_state_tensors, padding=padded - whole
    )


def weight_bytes(parameters: RankParameters, layout: Layout, settings: CostSettings) -> WeightBytes:
    """The whole weights of a rank, by when their gradients come."""
    width, units = (
        element_bytes(settings.precision).state,
        [unit for stage in parameters.stages for unit in stage.units],
    )
    first, last = _ends(parameters.stages, layout)
    blocks = [unit for unit in units if unit.is_block] or units
    matrices = (weight.numel(layout.tensor) for unit in blocks for weight in unit.weights)

    def size(found: Sequence[ModelUnit]) -> int:
        return width * sum(weight.numel(layout.tensor) for weight in distinct_parameters(found))

    return WeightBytes(
        whole=max(width * parameters.numel, width * sum(unit.padded_numel for unit in parameters.units)),
        head=size(last),
        embedding=size(first),
        is_tied=size([*first, *last]) < size(first) + size(last),
        block=width * max((unit.numel(layout.tensor) for unit in blocks), default=0),
        matrix=width * max(matrices, default=0),
    )


def _ends(stages: Sequence[StageUnits], layout: Layout) -> tuple[list[ModelUnit], list[ModelUnit]]:
    """What lies before the blocks of the model, and behind them; nothing where it has no blocks."""
    first: list[ModelUnit] = []
    last: list[ModelUnit] = []
    for stage in stages:
        places = [number for number, unit in enumerate(stage.units) if unit.is_block]
        if stage.number == 0 and places:
            first += stage.units[: places[0]]
        if stage.number == layout.num_stages - 1 and (places or layout.pipeline > 1):
            last += stage.units[places[-1] + 1 if places else 0 :]
    return first, last


def reducer_bytes(parameters: RankParameters, layout: Layout, settings: CostSettings) -> ReducerBytes:
    """What the reducer of a rank's gradients holds."""
    found, num_shards = element_bytes(settings.precision), Mesh(layout).sizes[2] if layout.zero else 1
    width, holds_step = found.state, resolve_hold(settings.hold, layout) == "step"
    if layout.zero == 3:
        units = parameters.units
        ahead = settings.prefetch * max((unit.padded_numel for unit in units if unit.is_freed), default=0)
        narrow = found.wire if found.wire < width else 0  # what arrives is as wide as the weights; then it is copied
        return ReducerBytes(
            3,
            holds_step,
            0.0,
            num_shards,
            rest=width * sum(unit.padded_numel for unit in units if not unit.is_freed and not unit.is_block),
            last_unit=width * sum(unit.padded_numel for unit in units if not unit.is_freed and unit.is_block),
            ahead=(width + narrow) * ahead,
        )
    sizes = [bucket.numel * width for bucket in parameters.buckets]
    if not sizes:
        return ReducerBytes(layout.zero, True, 0.0)
    return ReducerBytes(
        layout.zero,
        holds_step or layout.zero < 2,
        sum(sizes) / num_shards,
        num_shards,
        first_bucket=max(sizes[:2]),
        last_buckets=(sizes[-1], sizes[-2] if len(sizes) > 1 else 0),
        block_bucket=sorted(sizes)[len(sizes) // 2] if len(sizes) > 2 else 0,
    )


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
