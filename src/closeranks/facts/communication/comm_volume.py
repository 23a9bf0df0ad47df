"""Communication volume of a step: bytes and number of calls on each axis.

A row is one kind of collective on one axis, as one rank sees it. ``payload_bytes`` is the size of the whole tensor of a
collective (the input of a reduction, the output of a gather, the input of a scatter), summed over its calls, with
padding; ``sent_bytes`` is what a rank sends of it in a ring. Invariant: rows are a pure function of model, layout and
settings, and count what the reducers, activation collectives and stages of this package call, no more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from closeranks.core.traffic import ring_sent_bytes
from closeranks.facts.layout import Layout
from closeranks.facts.memory.activations import Keep, Recompute
from closeranks.facts.memory.fsdp_units import shard_numel
from closeranks.facts.memory.memory_per_rank import CostSettings, RankParameters, StageUnits, resolve_hold
from closeranks.facts.memory.state_bytes import ElementBytes, Precision, element_bytes
from closeranks.facts.mesh import Mesh
from closeranks.facts.packed_counters import num_values

Operation = Literal["all-reduce", "reduce-scatter", "all-gather", "send"]

_VOTES = 9
_FLOAT64 = 8
"""Bytes per element of votes and statistics."""


@dataclass(frozen=True, slots=True)
class CollectiveVolume:
    """One kind of traffic of one rank in one step."""

    axis: Literal["data", "shard", "replica", "tensor", "pipeline", "world"]
    """``data`` is shard and replica together."""
    what: str
    operation: Operation
    num_ranks: int
    calls: int
    payload_bytes: int

    @property
    def sent_bytes(self) -> int:
        """In a ring; a message is sent as it is."""
        if self.operation == "send":
            return self.payload_bytes
        return ring_sent_bytes(self.operation, self.num_ranks, self.payload_bytes)


@dataclass(frozen=True, slots=True)
class ActivationTraffic:
    """The activations of a Llama's micro-batch that the tensor and pipeline axes communicate."""

    num_tokens: int
    dim: int
    precision: Precision = "float32"
    recompute: Recompute = "none"
    keep: Sequence[Keep] = ()

    @property
    def element_bytes(self) -> ElementBytes:
        return element_bytes(self.precision)

    @property
    def repeats_collectives(self) -> bool:
        """Whether blocks are recomputed in backward, and their collectives repeated."""
        return self.recompute == "full" or (self.recompute == "selective" and "collective" not in self.keep)


def comm_volumes(
    parameters: RankParameters, layout: Layout, settings: CostSettings, traffic: ActivationTraffic | None = None
) -> tuple[CollectiveVolume, ...]:
    """Everything that one rank with these weights sends in a step; without ``traffic``, only the traffic of the
    state."""
    rows = [*_of_state(parameters, layout, settings), *_of_parts(parameters, layout, settings)]
    if traffic is not None:
        rows += [
            *_of_tensor(parameters.stages, layout, settings, traffic),
            *_of_pipeline(parameters.stages, layout, settings, traffic),
        ]
    if settings.num_statistics:  # plus one: the number of micro-batches they cover
        size = (settings.num_statistics + 1) * _FLOAT64
        rows.append(CollectiveVolume("data", "batch norm statistics", "all-reduce", layout.data, 1, size))
    used = 1 + num_values(settings.num_trained, layout.num_ranks) if settings.num_trained else 0
    vote = (_VOTES + settings.num_metrics + used) * _FLOAT64
    rows.append(CollectiveVolume("world", "the vote", "all-reduce", layout.num_ranks, 1, vote))
    return tuple(row for row in rows if row.num_ranks > 1 and row.calls)


def _of_state(parameters: RankParameters, layout: Layout, settings: CostSettings) -> Iterator[CollectiveVolume]:
    """Gradients and weights on the data axis."""
    if layout.zero == 3:
        yield from _of_units(parameters, layout, settings)
        return
    _, replicas, shards, _ = Mesh(layout).sizes
    plan = parameters.buckets
    num_bytes = sum(bucket.numel for bucket in plan) * element_bytes(settings.precision).state
    if layout.zero == 0:
        yield CollectiveVolume("data", "gradients", "all-reduce", layout.data, len(plan), num_bytes)
        return
    is_each = layout.zero == 2 and resolve_hold(settings.hold, layout) == "shards"
    times = settings.num_micro if is_each else 1
    yield CollectiveVolume("shard", "gradients", "reduce-scatter", shards, times * len(plan), times * num_bytes)
    yield CollectiveVolume("replica", "slices of gradients", "all-reduce", replicas, len(plan), num_bytes // shards)
    yield CollectiveVolume("shard", "weights", "all-gather", shards, len(plan), num_bytes)


def _of_units(parameters: RankParameters, layout: Layout, settings: CostSettings) -> Iterator[CollectiveVolume]:
    """ZeRO-3: units are gathered in forward and, where they were freed, again in backward. Replicas are summed once."""
    w, (_, replicas, shards, _) = element_bytes(settings.precision), Mesh(layout).sizes
    units = parameters.units
    is_step = resolve_hold(settings.hold, layout) == "step"
    times = 1 if is_step else settings.num_micro
    gathers = [times * (2 if unit.is_freed and not is_step else 1) for unit in units]
    sizes = [unit.padded_numel * (w.wire if unit.is_block else w.state) for unit in units]
    gathered = sum(count * size for count, size in zip(gathers, sizes, strict=True))
    whole = sum(unit.padded_numel for unit in units) * w.state
    yield CollectiveVolume("shard", "weights", "all-gather", shards, sum(gathers), gathered)
    yield CollectiveVolume("shard", "gradients", "reduce-scatter", shards, times * len(units), times * whole)
    yield CollectiveVolume("replica", "rows of gradients", "all-reduce", replicas, len(units), whole // shards)


def _of_parts(parameters: RankParameters, layout: Layout, settings: CostSettings) -> Iterator[CollectiveVolume]:
    """Partial gradients, which are summed over other axes too: one call per axis, on this rank's part after the data
    reduction."""
    width = element_bytes(settings.precision).state
    for axis, what, num_ranks in (
        ("tensor", "gradients of norms", layout.tensor),
        ("pipeline", "gradients of tied weights", 2),
    ):
        size = _left_of(axis, parameters, layout)
        if size:
            yield CollectiveVolume(
                "tensor" if axis == "tensor" else "pipeline", what, "all-reduce", num_ranks, 1, size * width
            )


def _left_of(axis: str, parameters: RankParameters, layout: Layout) -> int:
    """Elements of the gradients that are still to be summed over an axis, in the form the reducer keeps them."""
    concerned = {item.name: item.numel for item in parameters.items if axis in item.reduce_axes}
    if layout.zero == 3:
        num_shards = Mesh(layout).sizes[2]
        parts = (weight for weight in parameters.weights if weight.name in concerned)
        return sum(shard_numel(weight, layout.tensor, num_shards) for weight in parts)
    if not parameters.buckets:
        return sum(concerned.values())
    return sum(bucket.numel for bucket in parameters.buckets if axis in bucket.reduce_axes) // Mesh(layout).sizes[2]


def _of_tensor(
    stages: Sequence[StageUnits], layout: Layout, settings: CostSettings, traffic: ActivationTraffic
) -> Iterator[CollectiveVolume]:
    """Sequence parallel: inputs of products are all-gathered, outputs reduce-scattered; in backward the same
    collectives with the roles exchanged."""
    w, size = traffic.element_bytes, traffic.num_tokens * traffic.dim
    num_blocks = sum(unit.is_block for stage in stages for unit in stage.units)
    num_firsts = sum(stage.number == 0 for stage in stages)
    num_lasts = sum(stage.number == layout.num_stages - 1 for stage in stages)
    again = traffic.repeats_collectives
    entries, exits = 2 * num_blocks, 2 * num_blocks
    # Looked-up rows have the dtype of weights; recomputing a block stops before its last reduce-scatter.
    gathers = ((1 + again) * entries, w.stream), (exits, w.compute), (num_firsts, w.state), (num_lasts, w.stream)
    scatters = (
        (exits + again * num_blocks, w.compute),
        (entries, w.stream),
        (num_firsts, w.state),
        (num_lasts, w.stream),
    )
    operations: tuple[tuple[Operation, tuple[tuple[int, int], ...]], ...] = (
        ("all-gather", gathers),
        ("reduce-scatter", scatters),
    )
    for operation, rows in operations:
        calls = settings.num_micro * sum(count for count, _ in rows)
        payload = settings.num_micro * size * sum(count * width for count, width in rows)
        yield CollectiveVolume("tensor", "hidden states", operation, layout.tensor, calls, payload)
    loss = settings.num_micro * num_lasts
    yield CollectiveVolume(
        "tensor", "the loss", "all-reduce", layout.tensor, 2 * loss, loss * 3 * traffic.num_tokens * w.state
    )


def _of_pipeline(
    stages: Sequence[StageUnits], layout: Layout, settings: CostSettings, traffic: ActivationTraffic
) -> Iterator[CollectiveVolume]:
    """Hidden states to the next stage, gradients to the previous one, wherever that is on another rank."""
    if layout.pipeline == 1:
        return
    here = {stage.number for stage in stages}
    num_down = sum(number + 1 not in here and number < layout.num_stages - 1 for number in here)
    num_up = sum(number - 1 not in here and number > 0 for number in here)
    hidden = traffic.num_tokens // layout.tensor * traffic.dim * traffic.element_bytes.stream
    for what, count in (("hidden states", num_down), ("gradients of hidden states", num_up)):
        calls = settings.num_micro * count
        yield CollectiveVolume("pipeline", what, "send", layout.pipeline, calls, calls * hidden)
