"""Memory per rank under a layout: weights, gradients, optimizer state, and temporary buffers.

The tensor axis shards weights, the pipeline axis divides units into stages, and ZeRO shards the rest over the shard
axis: in flat buckets up to stage 2, row by row for each weight at stage 3. Invariants: weights and optimizer state add
up over the ranks to the whole model, apart from replicas and tied copies; everything else that a step needs for longer
than one operation is a buffer with a name. For activations see ``facts.activations``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from closeranks.facts.anatomy import Anatomy, Unit, Weight, distinct
from closeranks.facts.layout import Layout
from closeranks.facts.memory import OptimizerName, Part, Precision, num_remembered, widths
from closeranks.facts.mesh import Mesh
from closeranks.facts.rows import ShardedUnit, rows_of, sharded_units
from closeranks.facts.stages import balance, placement

Hold = Literal["shards", "step"]


@dataclass(frozen=True, slots=True)
class Stage:
    """One of a pipeline rank's stages."""

    number: int
    units: tuple[Unit, ...]


@dataclass(frozen=True, slots=True)
class Item:
    """A weight as input of a bucket plan."""

    name: str
    numel: int
    stage: int
    """Index among the rank's own stages; ``SEVERAL`` for a tied weight that is in more than one of them."""
    sums: tuple[str, ...]
    """Axes other than data over which its gradient must also be summed."""


SEVERAL = -1


@dataclass(frozen=True, slots=True)
class Bucket:
    numel: int
    """Includes the padding that aligns members and makes slices equal."""
    sums: tuple[str, ...] = ()


class BucketPlan(Protocol):
    """Plans which gradients are reduced together; the reducers' own plan, so that the prediction matches the run."""

    def __call__(self, items: Sequence[Item], *, num_shards: int, element_bytes: int) -> Sequence[Bucket]:
        """``num_shards`` is 0 where buckets are not sliced at all (ZeRO 0)."""
        ...


def one_bucket(items: Sequence[Item], *, num_shards: int, element_bytes: int) -> Sequence[Bucket]:
    """The simplest plan: one bucket for all gradients that are summed over the same axes."""
    totals = {sums: sum(item.numel for item in items if item.sums == sums) for sums in {item.sums for item in items}}
    return [Bucket(_round_up(total, max(num_shards, 1)), sums) for sums, total in sorted(totals.items())]


@dataclass(frozen=True, slots=True)
class Terms:
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
    buckets: BucketPlan = one_bucket
    num_metrics: int = 0
    """Sums in the vote's all-reduce besides the loss."""
    num_trained: int = 0
    """Parameters for which the vote reports whether they had a gradient."""
    num_statistics: int = 0
    """Running means and variances of batch norms that are averaged over the data ranks once per step."""

    @property
    def num_beside(self) -> int:
        """State tensors of a parameter's size that are kept for it, besides its gradient."""
        return num_remembered(self.optimizer) + self.has_average


@dataclass(frozen=True, slots=True)
class Holding:
    """Bytes that one rank holds, without activations."""

    parameters: int
    gradients: int
    optimizer: int
    buffers: tuple[Part, ...] = ()

    @property
    def buffer_bytes(self) -> int:
        return sum(buffer.num_bytes for buffer in self.buffers)

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.buffer_bytes


def hold_of(hold: str, layout: Layout) -> Hold:
    """Resolves ``auto``: a pipeline runs a stage once per micro-batch, so gathering every time would cost too much."""
    if hold in ("shards", "step"):
        return "step" if hold == "step" else "shards"
    return "step" if layout.pipeline > 1 else "shards"


def stages_of(anatomy: Anatomy, layout: Layout) -> tuple[tuple[Stage, ...], ...]:
    """The stages of every pipeline rank."""
    if layout.pipeline == 1:
        return ((Stage(0, anatomy.units),),)
    ranges = balance(tuple(unit.cost for unit in anatomy.units), layout.num_stages)
    return tuple(
        tuple(Stage(number, anatomy.units[slice(*ranges[number])]) for number in own)
        for own in placement(layout.schedule, layout.pipeline)
    )


@dataclass(frozen=True, slots=True)
class Share:
    """The weights of one pipeline rank, and the buckets in which their gradients are reduced."""

    stages: tuple[Stage, ...]
    weights: tuple[Weight, ...]
    """A tied weight is listed once."""
    items: tuple[Item, ...]
    buckets: tuple[Bucket, ...]
    """For ZeRO 0 to 2; empty where gradients stay where autograd put them."""
    units: tuple[ShardedUnit, ...] = ()
    """For ZeRO 3: what is gathered in one call."""

    @property
    def numel(self) -> int:
        return sum(item.numel for item in self.items)


def share_of(stages: tuple[Stage, ...], shared: Collection[str], layout: Layout, terms: Terms) -> Share:
    """``shared``: the weights of which other pipeline ranks hold a copy (``shared_names``)."""
    items = _items(stages, shared, layout.tensor)
    weights = distinct(unit for stage in stages for unit in stage.units)
    num_shards = Mesh(layout).sizes[2] if layout.zero else 0
    if layout.zero == 3:
        units = sharded_units([stage.units for stage in stages], tensor=layout.tensor, num_shards=num_shards)
        return Share(stages, weights, items, (), units)
    if layout.data == 1 and layout.zero == 0:
        return Share(stages, weights, items, ())
    plan = terms.buckets(items, num_shards=num_shards, element_bytes=widths(terms.precision).state)
    return Share(stages, weights, items, tuple(plan))


def _items(stages: Sequence[Stage], shared: Collection[str], tensor: int) -> tuple[Item, ...]:
    items: dict[str, Item] = {}
    for number, stage in enumerate(stages):
        for weight in distinct(stage.units):
            if weight.name in items:
                items[weight.name] = replace(items[weight.name], stage=SEVERAL)
                continue
            sums = ("tensor",) if weight.is_partial and tensor > 1 else ()
            ends = ("pipeline",) if weight.name in shared else ()
            items[weight.name] = Item(weight.name, weight.numel(tensor), number, sums + ends)
    return tuple(items.values())


def shared_names(everywhere: Sequence[Sequence[Stage]]) -> frozenset[str]:
    """Weights that more than one pipeline rank holds: tied weights whose users are on different ranks."""
    found: Counter[str] = Counter()
    for stages in everywhere:
        found.update({weight.name for stage in stages for unit in stage.units for weight in unit.weights})
    return frozenset(name for name, count in found.items() if count > 1)


def holding(share: Share, layout: Layout, terms: Terms, shard: int = 0) -> Holding:
    """The memory of a rank with these weights at coordinate ``shard`` of the shard axis. The first holds the most:
    where rows do not divide evenly the last ranks have fewer. Slices of buckets are equal, padding included."""
    if layout.zero == 3:
        return _fully_sharded(share, layout, terms, shard)
    return _sharded_in_buckets(share, layout, terms) if layout.zero else _whole(share, layout, terms)


def _whole(share: Share, layout: Layout, terms: Terms) -> Holding:
    """ZeRO 0. Gradients end up in buckets; before the last backward of a step they accumulate elsewhere."""
    state = share.numel * widths(terms.precision).state
    accumulates = layout.data > 1 and terms.num_micro > 1
    buffers = (Part("gradients of earlier micro-batches", state),) if accumulates else ()
    return Holding(state, state, state * terms.num_beside, buffers)


def _sharded_in_buckets(share: Share, layout: Layout, terms: Terms) -> Holding:
    """ZeRO 1 and 2: weights are views of padded buckets, and a rank owns a slice of each."""
    width, num_shards = widths(terms.precision).state, Mesh(layout).sizes[2]
    whole = share.numel * width
    padded = sum(bucket.numel for bucket in share.buckets) * width
    own = padded // num_shards
    sizes = [bucket.numel * width for bucket in share.buckets]
    buffers = [Part("padding of buckets", padded - whole)]
    if layout.zero == 1 or hold_of(terms.hold, layout) == "step":
        name, size = ("slices of summed gradients", own) if layout.zero == 1 else ("gradients until summed", whole)
        buffers += [Part(name, size), Part("bucket that is being filled", max(sizes))]
    else:
        travelling = _fullest_window(sizes, NUM_UNDER_WAY + 1, is_round=terms.num_micro > 1)
        arriving = _fullest_window(sizes, NUM_UNDER_WAY, is_round=terms.num_micro > 1) // num_shards
        buffers += [Part("gradients on their way", travelling), Part("slices arriving", arriving)]
    return Holding(
        parameters=whole,
        gradients=whole if layout.zero == 1 else own,
        optimizer=own * terms.num_beside,
        buffers=tuple(buffer for buffer in buffers if buffer.num_bytes),
    )


NUM_UNDER_WAY = 2
"""Buckets in flight where ZeRO-2 frees gradients in every backward, while one more is filled."""


def _fullest_window(sizes: Sequence[int], length: int, *, is_round: bool) -> int:
    """The largest sum of ``length`` consecutive buckets; ``is_round``: the first buckets, of the next micro-batch,
    follow the last."""
    row = list(sizes) * (1 + -(-length // len(sizes))) if is_round else list(sizes)
    return max(sum(row[start : start + length]) for start in range(len(sizes)))


def _fully_sharded(share: Share, layout: Layout, terms: Terms, shard: int) -> Holding:
    """ZeRO 3: each rank keeps rows of every weight, and gathers a unit at a time, or a stage for the whole step.

    Gathered weights have the weights' dtype; autocast casts them for products, as in every layout.
    """
    width = widths(terms.precision).state
    units, num_shards = share.units, Mesh(layout).sizes[2]
    # A tied weight of two stages is sharded in each of them.
    held = (weight for stage in share.stages for weight in distinct(stage.units))
    own = sum(rows_of(weight, layout.tensor, num_shards, shard) for weight in held)
    buffers = list(_gathered(units, terms))
    if hold_of(terms.hold, layout) == "step":
        whole = sum(unit.padded for unit in units) * width
        buffers = [Part("gathered weights of the stage", whole), Part("whole gradients until reduced", whole)]
    return Holding(
        parameters=own * width,
        gradients=own * width,
        optimizer=own * width * terms.num_beside,
        buffers=tuple(buffer for buffer in buffers if buffer.num_bytes),
    )


def _gathered(units: Sequence[ShardedUnit], terms: Terms) -> Iterator[Part]:
    """What stays gathered from forward to backward, the current unit, the prefetched ones, and gradients of two."""
    width = widths(terms.precision).state
    freed = sorted((unit.padded for unit in units if unit.is_freed), reverse=True)
    kept = sum(unit.padded for unit in units if not unit.is_freed)
    yield Part("gathered weights kept from forward to backward", kept * width)
    yield Part("gathered weights of the unit at work", sum(freed[:1]) * width)
    yield Part("gathered weights of units ahead", sum(freed[1 : 1 + terms.prefetch]) * width)
    yield Part("gradients of a unit, and of one on its way", 2 * max(unit.padded for unit in units) * width)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
