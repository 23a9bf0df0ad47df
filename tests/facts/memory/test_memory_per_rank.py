"""What each rank holds: shares that add up to the model, and what its reducer needs."""

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
    reducer_bytes,
    resolve_hold,
    stages_per_rank,
    tied_across_ranks,
    weight_bytes,
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


def test_a_reducer_holds_its_slices_and_the_buckets_under_way() -> None:
    sizes = (100, 20, 24, 40)
    terms = CostSettings(buckets=lambda items, num_shards, element_bytes: [BucketSize(size) for size in sizes])
    for zero in (1, 2):
        layout = Layout(2, zero=zero)
        (share,) = shares(layout, terms)
        found = reducer_bytes(share, layout, terms)
        assert found.kept == sum(sizes) * WIDTH / 2
        assert (found.first_bucket, found.last_buckets) == (100 * WIDTH, (40 * WIDTH, 24 * WIDTH))
        assert found.holds_step == (zero == 1)
    (share,) = shares(Layout(2), terms)
    assert reducer_bytes(share, Layout(2), terms).kept == sum(sizes) * WIDTH


def test_zero_3_gathers_the_unit_at_work_and_those_ahead() -> None:
    layout = Layout(2, zero=3)
    (share,) = shares(layout, CostSettings())
    block = max(unit.padded_numel for unit in share.units if unit.is_block)
    for precision, each in (("float32", 4), ("bf16", 6)):
        for prefetch in (0, 1, 2):
            found = reducer_bytes(share, layout, CostSettings(prefetch=prefetch, precision=precision))  # type: ignore[arg-type]
            assert found.rest == (2 * TINY.vocab_size * TINY.dim + TINY.dim) * WIDTH
            assert found.last_unit == block * WIDTH, "the last block's backward follows its forward at once"
            assert found.ahead == prefetch * block * each
    assert [unit.is_freed for unit in share.units] == [True] * (TINY.num_layers - 1) + [False, False]


@pytest.mark.parametrize("text", ["data=2", "tensor=2", "data=2 zero=1", "data=2 zero=3"])
def test_weights_are_told_by_when_their_gradients_come(text: str) -> None:
    layout = Layout.parse(text)
    (share,) = shares(layout, CostSettings())
    found = weight_bytes(share, layout, CostSettings())
    table, norm = TINY.vocab_size * TINY.dim * WIDTH // layout.tensor, TINY.dim * WIDTH
    assert (found.embedding, found.head, found.is_tied) == (table, table + norm, False)
    assert found.whole == found.embedding + found.head + TINY.num_layers * found.block
    tied = replace(TINY, tied=True)
    (share,) = shares(layout, CostSettings(), tied)
    assert weight_bytes(share, layout, CostSettings()).is_tied
    first, last = shares(Layout(pipeline=2), CostSettings(), tied)
    ends = [weight_bytes(one, Layout(pipeline=2), CostSettings()) for one in (first, last)]
    assert [(bool(one.embedding), bool(one.head), one.is_tied) for one in ends] == [
        (True, False, False),
        (False, True, False),
    ]


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
