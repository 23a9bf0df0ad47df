"""What each rank holds: shares that add up to the model, and buffers with names."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from closeranks.facts.layout import SCHEDULES, Layout
from closeranks.facts.memory.memory_per_rank import (
    BucketSize,
    CostSettings,
    RankMemory,
    RankParameters,
    rank_memory,
    rank_parameters,
    resolve_hold,
    stages_per_rank,
    tied_across_ranks,
)
from closeranks.facts.mesh import Mesh
from closeranks.facts.shapes.llama import PRESETS, LlamaShape, llama_structure, num_params
from tests.facts.powers import layouts_of_powers

TINY = PRESETS["tiny"]
WIDTH = 4
ADAM = 2
SMALL = [
    layout
    for num_ranks in range(1, 9)
    for layout in layouts_of_powers(num_ranks)
    if layout.context == 1 and layout.pipeline <= 8
]


def shares(layout: Layout, terms: CostSettings, shape: LlamaShape = TINY) -> list[RankParameters]:
    """Of every pipeline rank."""
    everywhere = stages_per_rank(llama_structure(shape, 64), layout)
    return [rank_parameters(stages, tied_across_ranks(everywhere), layout, terms) for stages in everywhere]


def holdings(layout: Layout, terms: CostSettings | None = None, shape: LlamaShape = TINY) -> list[RankMemory]:
    """Of every rank, in no particular order; tensor ranks and replicas are alike."""
    terms = terms or CostSettings()
    copies = range(Mesh(layout).sizes[1] * layout.tensor)
    shards = range(Mesh(layout).sizes[2])
    return [
        rank_memory(share, layout, terms, shard)
        for share in shares(layout, terms, shape)
        for shard in shards
        for _ in copies
    ]


def buffers(held: RankMemory) -> dict[str, int]:
    return {part.name: part.num_bytes for part in held.buffers}


@given(st.sampled_from(SMALL))
def test_weights_add_up_to_copies_of_the_model(layout: Layout) -> None:
    """Norms are whole on every tensor rank, all else is split; ZeRO-3 splits over the shards too, ZeRO 1 and 2 the
    optimizer's part (padding of less than a slice of each bucket apart)."""
    held = holdings(layout)
    assert len(held) == layout.num_ranks
    norms = (2 * TINY.num_layers + 1) * TINY.dim
    whole = num_params(TINY) + (layout.tensor - 1) * norms
    shards = Mesh(layout).sizes[2]
    assert sum(one.parameters for one in held) == whole * WIDTH * layout.data // (shards if layout.zero == 3 else 1)
    optimizer = whole * WIDTH * ADAM * layout.data // shards
    assert 0 <= sum(one.optimizer for one in held) - optimizer <= 2 * layout.num_ranks * shards * WIDTH * ADAM
    assert all(one.total >= one.parameters + one.gradients + one.optimizer for one in held)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_stages_cover_the_units_in_order(schedule: str) -> None:
    whole = llama_structure(TINY, 64)
    layout = Layout(pipeline=4, schedule=schedule)
    stages = sorted((stage for own in stages_per_rank(whole, layout) for stage in own), key=lambda stage: stage.number)
    assert [stage.number for stage in stages] == list(range(layout.num_stages))
    assert tuple(unit for stage in stages for unit in stage.units) == whole.units


def test_a_tied_weight_is_held_at_both_ends_and_summed_between_them() -> None:
    tied = replace(TINY, tied=True)
    first, *middle, last = shares(Layout(pipeline=4), CostSettings(), tied)
    assert [item.name for item in first.items if item.reduce_axes] == ["model.embed_tokens.weight"]
    assert [item.reduce_axes for item in last.items if item.name == "model.embed_tokens.weight"] == [("pipeline",)]
    assert not any(item.reduce_axes for share in middle for item in share.items)
    (both, *_) = shares(Layout(pipeline=2, schedule="zbv"), CostSettings(), tied)
    assert [item.name for item in both.items].count("model.embed_tokens.weight") == 1
    assert not any(item.reduce_axes for item in both.items), "both ends are on one rank"


def test_norms_are_summed_over_the_tensor_axis() -> None:
    (share,) = shares(Layout(tensor=2), CostSettings())
    assert {item.name for item in share.items if item.reduce_axes == ("tensor",)} == {
        item.name for item in share.items if "norm" in item.name
    }
    (alone,) = shares(Layout(data=2), CostSettings())
    assert not any(item.reduce_axes for item in alone.items)


def test_what_auto_holds() -> None:
    assert resolve_hold("auto", Layout(data=2, zero=3)) == "shards"
    assert resolve_hold("auto", Layout(data=2, zero=3, pipeline=2)) == "step"
    assert resolve_hold("shards", Layout(pipeline=2)) == "shards"
    assert resolve_hold("step", Layout()) == "step"


def test_buffers_of_each_stage_of_zero() -> None:
    whole = num_params(TINY) * WIDTH
    accumulating = CostSettings(num_micro=3)
    assert buffers(holdings(Layout(2), accumulating)[0]) == {"gradients of earlier micro-batches": whole}
    assert buffers(holdings(Layout(2), CostSettings(num_micro=1))[0]) == {}
    assert buffers(holdings(Layout(2, zero=1), accumulating)[0]) == {
        "slices of summed gradients": whole // 2,
        "bucket that is being filled": whole,
    }
    step = replace(accumulating, hold="step")
    assert buffers(holdings(Layout(2, zero=2), step)[0]) == {
        "gradients until summed": whole,
        "bucket that is being filled": whole,
    }
    assert buffers(holdings(Layout(2, zero=3), step)[0]) == {
        "gathered weights of the stage": whole,
        "whole gradients until reduced": whole,
    }


def test_zero_2_holds_no_more_gradients_than_travel_at_once() -> None:
    """Two buckets travel while a third is filled; those of the next micro-batch follow on those of this one."""
    sizes = (100, 20, 20, 40)
    terms = CostSettings(
        hold="shards", buckets=lambda items, num_shards, element_bytes: [BucketSize(size) for size in sizes]
    )
    (share,) = shares(Layout(2, zero=2), terms)
    once = rank_memory(share, Layout(2, zero=2), terms)
    assert buffers(once)["gradients in flight"] == (100 + 20 + 20) * WIDTH
    assert buffers(once)["slices arriving"] == (100 + 20) * WIDTH // 2
    again = rank_memory(share, Layout(2, zero=2), replace(terms, num_micro=2))
    assert buffers(again)["gradients in flight"] == (40 + 100 + 20) * WIDTH
    assert buffers(again)["slices arriving"] == (40 + 100) * WIDTH // 2
    assert once.gradients == again.gradients == sum(sizes) * WIDTH // 2


def test_zero_3_gathers_the_unit_at_work_and_those_ahead() -> None:
    layout = Layout(2, zero=3)
    (share,) = shares(layout, CostSettings())
    units = share.units
    block = max(unit.padded_numel for unit in units if unit.is_block)
    kept = 2 * TINY.vocab_size * TINY.dim + TINY.dim + block  # the last block's backward follows its forward at once
    for prefetch in (0, 1, 2):
        found = buffers(rank_memory(share, layout, CostSettings(prefetch=prefetch)))
        assert found["gathered weights kept from forward to backward"] == kept * WIDTH
        assert found["gathered weights of the unit at work"] == block * WIDTH
        assert found.get("gathered weights of units ahead", 0) == prefetch * block * WIDTH
    assert [unit.is_freed for unit in units] == [True] * (TINY.num_layers - 1) + [False, False]


@given(st.sampled_from(SMALL), st.sampled_from(["float32", "bf16", "fp16"]))
def test_only_float64_changes_the_width_of_state(layout: Layout, precision: str) -> None:
    (one, *_), (wide, *_) = (
        holdings(layout, CostSettings(precision=name))  # type: ignore[arg-type]
        for name in (precision, "float64")
    )
    assert (wide.parameters, wide.gradients, wide.optimizer) == (
        2 * one.parameters,
        2 * one.gradients,
        2 * one.optimizer,
    )
