"""Layouts as values: the text form is exact, legality names every obstacle."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from closeranks.core.errors import ConfigError
from closeranks.facts.layout import SCHEDULES, Layout, LayoutConstraints, divisors, legal_problems
from closeranks.facts.shapes.llama import PRESETS
from tests.facts.powers import layouts_of_powers

TINY = PRESETS["tiny"]
DEMANDS = LayoutConstraints(
    global_batch=24,
    micro_batch=3,
    num_heads=TINY.num_heads,
    num_kv_heads=TINY.num_kv_heads,
    num_layers=TINY.num_layers,
    vocab_size=TINY.vocab_size,
    ffn_dim=TINY.ffn_dim,
    seq_len=64,
)
DIGITS = LayoutConstraints(global_batch=24, micro_batch=3)

sizes = st.integers(0, 64)
layouts = st.builds(
    Layout,
    data=sizes,
    zero=st.integers(0, 3),
    shard=sizes,
    tensor=sizes,
    pipeline=sizes,
    context=sizes,
    expert=sizes,
    schedule=st.sampled_from(sorted(SCHEDULES)),
)


def places(layout: Layout, demands: LayoutConstraints = DEMANDS) -> list[str]:
    return [problem.place for problem in legal_problems(layout, demands)]


@given(layouts)
def test_text_and_layout_are_inverse(layout: Layout) -> None:
    assert Layout.parse(str(layout)) == layout


@given(layouts)
def test_order_and_commas_do_not_matter(layout: Layout) -> None:
    assert Layout.parse(",  ".join(reversed(str(layout).split()))) == layout


def test_default_layout_is_one_rank() -> None:
    assert Layout.parse("") == Layout() == Layout.parse("data=1")
    assert (str(Layout()), Layout().num_ranks) == ("data=1", 1)


def test_parse_reports_every_mistake_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        Layout.parse("dta=2 tensor=two data=2 data=4 pipeline=-1 context")
    text = str(caught.value)
    assert len(caught.value.problems) == 5
    assert "Did you mean 'data'?" in text
    assert "'two' is not a whole number" in text
    assert "given twice" in text
    assert [p.place for p in caught.value.problems if "pipeline" in p.place or "context" in p.place] == [
        "layout.pipeline",
        "layout.context",
    ]


@pytest.mark.parametrize("num_ranks", range(1, 9))
def test_tiny_is_legal_under_every_layout_of_up_to_eight_ranks(num_ranks: int) -> None:
    for layout in layouts_of_powers(num_ranks):
        assert legal_problems(layout, DEMANDS) == ()


@given(
    layouts,
    st.sampled_from([DEMANDS, DIGITS, replace(DEMANDS, num_kv_heads=6, num_heads=12), replace(DEMANDS, seq_len=20)]),
)
def test_legal_means_that_everything_divides(layout: Layout, demands: LayoutConstraints) -> None:
    """The law, written a second time as one expression."""
    legal = (
        min(layout.data, layout.tensor, layout.pipeline, layout.context) >= 1
        and layout.expert == 1
        and demands.num_micro >= layout.data
        and (layout.shard == 0 or layout.data % layout.shard == 0)
        and not (layout.shard > 1 and layout.zero == 0)
        and all(
            layout.tensor == 1 or (count and count % layout.tensor == 0)
            for count in (demands.num_heads, demands.num_kv_heads, demands.ffn_dim, demands.vocab_size)
        )
        and demands.seq_len % layout.tensor == 0
        and (layout.pipeline == 1 or layout.pipeline * SCHEDULES[layout.schedule] <= demands.num_layers)
        and (layout.context == 1 or (demands.seq_len > 0 and demands.seq_len % layout.context == 0))
    )
    assert (places(layout, demands) == []) == bool(legal)


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ("data=9", "layout.data", "9 data ranks share 8 micro-batches"),
        ("data=0", "layout.data", "at least 1 rank"),
        ("data=6 zero=3 shard=4", "layout.shard", "Use one of [1, 2, 3, 6]"),
        ("data=4 shard=2", "layout.shard", "with zero=0 there is nothing to split"),
        ("data=2 zero=4", "layout.zero", "no ZeRO stage 4"),
        ("tensor=3", "layout.tensor", "Use one of [1, 2, 4, 8]"),
        ("pipeline=9", "layout.pipeline", "8 layers do not fill 9 stages"),
        ("pipeline=8 schedule=zbv", "layout.pipeline", "up to pipeline=4"),
        ("context=3", "layout.context", "3 does not divide the 64 positions"),
        ("expert=2", "layout.expert", "no experts"),
        ("pipeline=2 schedule=1f1", "layout.schedule", "Did you mean '1f1b'?"),
    ],
)
def test_each_obstacle_is_named_with_its_fix(text: str, place: str, words: str) -> None:
    problems = legal_problems(Layout.parse(text), DEMANDS)
    assert place in [problem.place for problem in problems]
    assert words in "\n".join(map(str, problems))


def test_a_model_without_structure_allows_only_data() -> None:
    assert places(Layout(data=8, zero=3), DIGITS) == []
    assert places(Layout(tensor=2, pipeline=2, context=2), DIGITS) == [
        "layout.tensor",
        "layout.pipeline",
        "layout.context",
    ]


def test_a_model_with_a_table_of_its_own_is_asked_when_it_is_built() -> None:
    assert places(Layout(tensor=3), replace(DIGITS, has_tensor_rules=True)) == []


def test_one_sentence_names_everything_that_does_not_divide() -> None:
    (problem,) = legal_problems(Layout(tensor=8), replace(DEMANDS, num_kv_heads=4, seq_len=60))
    assert problem.what == "8 does not divide the model's 4 key-value heads, 60 positions of a sample"
    assert problem.fix == "Use one of [1, 2, 4]."


def test_one_is_spoken_of_as_one() -> None:
    (shard,) = legal_problems(Layout(1, zero=1, shard=2), DEMANDS)
    assert shard.what == "2 does not divide the 1 data rank"
    (data,) = legal_problems(Layout(2), replace(DEMANDS, global_batch=4, micro_batch=4))
    assert "2 data ranks share 1 micro-batch a step" in data.what
    (pipeline,) = legal_problems(Layout(pipeline=2), replace(DEMANDS, num_layers=1))
    assert pipeline.what == "the model's 1 layer does not fill 2 stages"


def test_all_obstacles_come_at_once() -> None:
    layout = Layout(data=16, zero=1, shard=3, tensor=3, pipeline=9, context=5, expert=2)
    assert set(places(layout)) == {
        "layout.data",
        "layout.shard",
        "layout.tensor",
        "layout.pipeline",
        "layout.context",
        "layout.expert",
    }


@given(st.integers(1, 100), st.integers(1, 100))
def test_a_short_last_micro_batch_counts(global_batch: int, micro_batch: int) -> None:
    demands = LayoutConstraints(global_batch=global_batch, micro_batch=micro_batch)
    assert (demands.num_micro - 1) * micro_batch < global_batch <= demands.num_micro * micro_batch


def test_divisors_are_found_without_trying_every_number() -> None:
    for number in range(1, 300):
        for most in (None, 1, 7, 300):
            every = [size for size in range(1, min(number, most or number) + 1) if number % size == 0]
            assert divisors(number, most) == every
    assert divisors(10**12)[-2:] == [5 * 10**11, 10**12]
