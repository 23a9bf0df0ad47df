"""What travels in a step: every row counted by hand for one small model, and laws that hold for all."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from closeranks.facts.communication.comm_volume import ActivationTraffic, CollectiveVolume, comm_volumes
from closeranks.facts.layout import Layout
from closeranks.facts.memory.memory_per_rank import BucketSize, CostSettings
from closeranks.facts.memory.state_bytes import Precision
from closeranks.facts.shapes.llama import num_params
from tests.facts.memory.test_memory_per_rank import SMALL, TINY, shares

WIDTH = 4
TOKENS = 3 * 64
HIDDEN = TOKENS * TINY.dim
L = TINY.num_layers


def rows(
    layout: Layout, terms: CostSettings | None = None, flow: ActivationTraffic | None = None, rank: int = 0
) -> list[CollectiveVolume]:
    terms = terms or CostSettings()
    return list(comm_volumes(shares(layout, terms)[rank], layout, terms, flow))


def counted(found: list[CollectiveVolume]) -> dict[tuple[str, str, str], tuple[int, int]]:
    return {(row.axis, row.operation, row.what): (row.calls, row.payload_bytes) for row in found}


VOTE = {("world", "all-reduce", "the vote"): (1, 72)}


def test_a_ring_sends_all_but_ones_own_share() -> None:
    four = {
        op: CollectiveVolume("data", "", op, 4, 1, 1000).sent_bytes
        for op in ("all-reduce", "reduce-scatter", "all-gather")
    }
    assert four == {"all-reduce": 1500, "reduce-scatter": 750, "all-gather": 750}
    assert CollectiveVolume("pipeline", "", "send", 4, 2, 1000).sent_bytes == 1000


def test_one_rank_sends_nothing() -> None:
    assert rows(Layout(), flow=ActivationTraffic(TOKENS, TINY.dim)) == []


def test_replicas_sum_gradients_once_per_step_in_buckets() -> None:
    terms = CostSettings(
        num_micro=5, buckets=lambda items, num_shards, element_bytes: [BucketSize(300), BucketSize(700)]
    )
    assert counted(rows(Layout(4), terms)) == {("data", "all-reduce", "gradients"): (2, 4000), **VOTE}


def test_zero_1_and_2_scatter_gradients_and_gather_weights() -> None:
    whole = num_params(TINY) * WIDTH
    for zero, hold, times in ((1, "shards", 1), (2, "shards", 5), (2, "step", 1)):
        terms = CostSettings(num_micro=5, hold=hold)  # type: ignore[arg-type]
        assert counted(rows(Layout(4, zero=zero), terms)) == {
            ("shard", "reduce-scatter", "gradients"): (times, times * whole),
            ("shard", "all-gather", "weights"): (1, whole),
            **VOTE,
        }


def test_replicas_of_shards_sum_their_slices_once() -> None:
    whole = num_params(TINY) * WIDTH
    for zero in (1, 2, 3):
        found = counted(rows(Layout(8, zero=zero, shard=2), CostSettings(num_micro=5)))
        calls = {1: 1, 2: 1, 3: L + 1}[zero]
        key = ("replica", "all-reduce", "rows of gradients" if zero == 3 else "slices of gradients")
        assert found[key] == (calls, whole // 2)


@pytest.mark.parametrize("precision", ["float32", "bf16", "fp16"])
def test_zero_3_gathers_twice_what_it_freed(precision: Precision) -> None:
    """All blocks but the last, whose backward follows its forward; the rest stays, and is never rounded."""
    rest = 2 * TINY.vocab_size * TINY.dim + TINY.dim
    blocks = num_params(TINY) - rest
    wire = 2 if precision == "bf16" else 4
    found = counted(rows(Layout(2, zero=3), CostSettings(precision=precision, num_micro=3, hold="shards")))
    gathered = 3 * ((2 * L - 1) * blocks // L * wire + rest * WIDTH)
    assert found["shard", "all-gather", "weights"] == (3 * 2 * L, gathered)
    assert found["shard", "reduce-scatter", "gradients"] == (3 * (L + 1), 3 * num_params(TINY) * WIDTH)
    once = counted(rows(Layout(2, zero=3), CostSettings(precision=precision, num_micro=3, hold="step")))
    assert once["shard", "all-gather", "weights"] == (L + 1, blocks * wire + rest * WIDTH)
    assert once["shard", "reduce-scatter", "gradients"] == (L + 1, num_params(TINY) * WIDTH)


@pytest.mark.parametrize(
    ("precision", "stream", "product"), [("float32", 4, 4), ("bf16", 2, 2), ("fp16", 4, 2), ("float64", 8, 8)]
)
def test_the_tensor_axis_gathers_and_scatters_around_every_product(
    precision: Precision, stream: int, product: int
) -> None:
    width = 8 if precision == "float64" else 4
    found = counted(
        rows(
            Layout(tensor=2),
            CostSettings(precision=precision, num_micro=3),
            ActivationTraffic(TOKENS, TINY.dim, precision),
        )
    )
    each = 3 * HIDDEN * (2 * L * (stream + product) + width + stream)
    norms = (2 * L + 1) * TINY.dim * width
    assert found == {
        ("tensor", "all-gather", "hidden states"): (3 * (4 * L + 2), each),
        ("tensor", "reduce-scatter", "hidden states"): (3 * (4 * L + 2), each),
        ("tensor", "all-reduce", "the loss"): (6, 3 * 3 * TOKENS * width),
        ("tensor", "all-reduce", "gradients of norms"): (1, norms),
        **VOTE,
    }


def test_blocks_computed_again_cross_again_unless_that_is_kept() -> None:
    flow = ActivationTraffic(TOKENS, TINY.dim, recompute="full")
    plain, full, kept, forgotten = (
        counted(rows(Layout(tensor=2), CostSettings(), one))
        for one in (
            replace(flow, recompute="none"),
            flow,
            replace(flow, recompute="selective", keep=("collective",)),
            replace(flow, recompute="selective", keep=("matmul",)),
        )
    )
    assert kept == plain
    assert full == forgotten
    gather, scatter = ("tensor", "all-gather", "hidden states"), ("tensor", "reduce-scatter", "hidden states")
    assert full[gather][0] - plain[gather][0] == 2 * L
    assert full[scatter][0] - plain[scatter][0] == L


def test_hidden_states_go_down_the_pipeline_and_gradients_up() -> None:
    layout, flow = Layout(pipeline=4), ActivationTraffic(TOKENS, TINY.dim, "bf16")
    message = 5 * HIDDEN * 2
    down, up = ("pipeline", "send", "hidden states"), ("pipeline", "send", "gradients of hidden states")
    found = [counted(rows(layout, CostSettings(num_micro=5, precision="bf16"), flow, rank)) for rank in range(4)]
    assert [row.get(down) for row in found] == [(5, message)] * 3 + [None]
    assert [row.get(up) for row in found] == [None] + [(5, message)] * 3
    split = counted(rows(Layout(tensor=2, pipeline=4), CostSettings(num_micro=5, precision="bf16"), flow))
    assert split[down] == (5, message // 2)


def test_a_v_turns_round_on_its_last_rank_without_a_message() -> None:
    layout, flow = Layout(pipeline=4, schedule="zbv"), ActivationTraffic(TOKENS, TINY.dim)
    found = [counted(rows(layout, CostSettings(num_micro=1), flow, rank)) for rank in range(4)]
    assert [row["pipeline", "send", "hidden states"][0] for row in found] == [1, 2, 2, 1]
    assert [row["pipeline", "send", "gradients of hidden states"][0] for row in found] == [1, 2, 2, 1]


def test_tied_ends_sum_their_gradient_once() -> None:
    tied = replace(TINY, tied=True)
    for layout, size in (
        (Layout(pipeline=2), 1),
        (Layout(4, zero=1, pipeline=2), 4),
        (Layout(4, zero=3, pipeline=2), 4),
    ):
        for share in shares(layout, CostSettings(), tied):
            found = counted(list(comm_volumes(share, layout, CostSettings())))
            whole = TINY.vocab_size * TINY.dim * WIDTH
            assert found["pipeline", "all-reduce", "gradients of tied weights"] == (1, whole // size)


@given(st.sampled_from(SMALL), st.integers(1, 4))
def test_rows_have_partners_and_sizes(layout: Layout, num_micro: int) -> None:
    terms, flow = CostSettings(num_micro=num_micro), ActivationTraffic(TOKENS, TINY.dim)
    for rank in range(layout.pipeline):
        for row in rows(layout, terms, flow, rank):
            assert row.num_ranks > 1
            assert row.calls > 0
            assert row.payload_bytes > 0
            assert 0 < row.sent_bytes < 2 * row.payload_bytes


def test_batch_norms_average_their_statistics_once_per_step() -> None:
    found = counted(rows(Layout(2, zero=1), CostSettings(num_statistics=96)))
    assert found["data", "all-reduce", "batch norm statistics"] == (1, 97 * 8)


def test_metrics_make_the_vote_longer() -> None:
    (vote,) = rows(Layout(2), CostSettings(num_metrics=3, buckets=lambda items, num_shards, element_bytes: []))
    assert vote.payload_bytes == 12 * 8


def test_the_vote_says_of_every_parameter_whether_it_had_a_gradient() -> None:
    """Four ranks count in three bits: seventeen parameters to a number, and one number that says whether to look."""
    (vote,) = rows(Layout(4), CostSettings(num_trained=35, buckets=lambda items, num_shards, element_bytes: []))
    assert vote.payload_bytes == (9 + 1 + 3) * 8
