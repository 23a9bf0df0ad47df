"""What of the model's state does a rank hold? Weights, gradients, optimizer, and the buffers that ZeRO needs.

Closed forms, for searches over many layouts. Invariant: for a run of this package they are the bytes that
``facts.memory.memory_per_rank`` counts weight by weight, but for the padding of buckets and their exact sizes.
"""

from __future__ import annotations

from dataclasses import dataclass

from closeranks.facts.layout import Layout
from closeranks.facts.memory.peak import ReducerBytes, WeightBytes
from closeranks.facts.memory.state_bytes import NamedBytes
from closeranks.plan.memory.conventions import OWN, StateConvention
from closeranks.plan.memory.model_sizes import RankParams

_BUCKET_BYTES = 25 * 2**20
_MOST_LIVE = 1e9
"""Elements that DeepSpeed keeps gathered by default."""
_MOMENTS = {"adamw": 2, "lamb": 2, "sgd": 1, "lars": 1}


@dataclass(frozen=True, slots=True)
class StateBytes:
    weights: float
    gradients: float
    optimizer: float
    buffers: tuple[NamedBytes, ...]

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + sum(buffer.num_bytes for buffer in self.buffers)


def num_shards(layout: Layout) -> int:
    """Ranks over which ZeRO divides a state. Ranks of the context axis hold the same weights, as data ranks do."""
    return (layout.shard or layout.data) * layout.context if layout.zero else 1


def state_bytes(
    params: RankParams,
    layout: Layout,
    convention: StateConvention,
    *,
    optimizer: str = "adamw",
    offload: bool = False,
) -> StateBytes:
    shards = num_shards(layout)
    # Experts are held by every ``expert``-th data rank only, and divided over those.
    expert_shards = max(1, shards // layout.expert)

    def held(bytes_each: float, from_stage: int) -> float:
        """Divided from this ZeRO stage on."""
        if layout.zero < from_stage:
            return bytes_each * params.total
        return bytes_each * (params.dense / shards + params.experts / expert_shards)

    kept = convention.master + convention.moments * _MOMENTS.get(optimizer, 2) / 2
    gradients_from = 3 if layout.zero == 2 and holds_whole_step(layout) and convention is not OWN else 2
    buffers = [] if convention is OWN else _buffers(params, layout, convention)
    return StateBytes(
        weights=held(convention.weight, 3),
        gradients=held(convention.gradient, gradients_from),
        optimizer=0.0 if offload else held(kept, 1),
        buffers=tuple(buffer for buffer in buffers if buffer.num_bytes),
    )


def holds_whole_step(layout: Layout) -> bool:
    """A pipeline runs a stage once per micro-batch: gathering and reducing every time would cost too much."""
    return layout.pipeline > 1


def own_weights(params: RankParams) -> WeightBytes:
    """A rank's whole weights, as this package trains them."""
    return WeightBytes(
        whole=4 * params.total,
        head=4 * params.head,
        embedding=4 * params.embedding,
        is_tied=params.is_tied,
        block=4 * params.block,
        matrix=4 * params.largest_block_matrix,
    )


def own_reducer(params: RankParams, layout: Layout, *, is_half: bool) -> ReducerBytes:
    """What the reducer of this package holds. ``is_half``: whether ZeRO-3 gathers blocks in half precision."""
    shards, holds_step = num_shards(layout), holds_whole_step(layout)
    whole, matrix = 4 * params.total, max(_BUCKET_BYTES, 4 * params.largest_block_matrix)
    if layout.zero == 0:
        return ReducerBytes(0, True, whole if layout.data > 1 else 0.0)
    if layout.zero == 3:
        rest, block = 4 * params.ends, 4 * params.block
        return ReducerBytes(
            3, holds_step, 0.0, shards, rest=rest, last_unit=block, ahead=block * (1.5 if is_half else 1.0)
        )
    first = max(matrix, 0.0 if params.is_tied else 4 * params.head)
    last = max(matrix, 4 * params.embedding)
    return ReducerBytes(
        layout.zero,
        holds_step or layout.zero == 1,
        whole / shards,
        shards,
        first_bucket=min(whole, first),
        last_buckets=(min(whole, last), min(max(whole - last, 0.0), matrix)),
        block_bucket=min(whole, matrix),
    )


def _buffers(params: RankParams, layout: Layout, convention: StateConvention) -> list[NamedBytes]:
    if layout.zero == 3:
        # Of blocks the one at work and the next; what is not a block stays gathered from forward to backward.
        # DeepSpeed gathers module by module, and frees beyond a number of elements that its settings limit.
        is_limited = convention.master > 0
        block = min(params.block, _MOST_LIVE / 2) if is_limited else params.block
        ends = min(params.ends, _MOST_LIVE) if is_limited else params.ends
        return [
            _named("gathered weights", convention.gathered * min(params.total, ends + 2 * block)),
            _named("gradients of a unit", (2 if is_limited else 4) * max(ends, block)),
        ]
    if layout.zero == 2:
        return [_named("gradients in flight", min(params.total, 5e8) * convention.gradient)]
    return []


def _named(name: str, num_bytes: float) -> NamedBytes:
    return NamedBytes(name, round(num_bytes))
