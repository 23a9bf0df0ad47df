"""Columns and words."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from closeranks.core.errors import Problem
from closeranks.facts.layout import Layout
from closeranks.plan import layout_text
from closeranks.plan.layout_text import BRIEF, COLUMNS, ByteUnit
from closeranks.plan.layouts import LayoutSearch, PlanningJob, RefusedLayouts, layout_cost
from tests.plan.test_layouts import tiny

__all__ = ["tiny"]


@given(st.integers(0, 2**50))
def test_the_unit_leaves_the_largest_number_readable(largest: int) -> None:
    scale = ByteUnit.for_largest(largest)
    assert len(scale.text(largest)) <= 6
    assert largest < 10 * 1024 or largest / scale.size >= 10


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "-"), (1, "<.01"), (1 << 20, "1.00"), (15 << 20, "15.0"), (100 << 20, "100"), (5000 << 20, "5,000")],
)
def test_three_digits(num_bytes: int, text: str) -> None:
    assert ByteUnit("MiB", 1 << 20).text(num_bytes) == text


def test_words_that_change_nothing_do_not_make_another_layout() -> None:
    assert layout_text.canonical_layout(Layout(2, zero=1, shard=2, schedule="zbv")) == Layout(2, zero=1)
    assert layout_text.canonical_layout(Layout(1, zero=3, tensor=2)) == Layout(tensor=2)
    assert layout_text.canonical_layout(Layout(4, zero=1, shard=2)) == Layout(4, zero=1, shard=2)


def test_a_row_has_a_cell_for_every_column(tiny: PlanningJob) -> None:
    scale = ByteUnit("KiB", 1024)
    plain = dict(
        zip(COLUMNS, layout_text.table_row(layout_cost(tiny, Layout(8)), scale, knows_activations=True), strict=True)
    )
    assert plain["layout"] == "data=8"
    assert (plain["bubble"], plain["tensor"], plain["pipe"]) == ("-", "-", "-")
    assert plain["weights"] == plain["grads"] != "-"
    cells = layout_text.table_row(layout_cost(tiny, Layout(pipeline=2)), scale, knows_activations=False)
    piped = dict(zip(COLUMNS, cells, strict=True))
    assert (piped["activ."], piped["bubble"], piped["data"]) == ("?", "11.1%", "-")


def test_a_narrow_row_adds_columns_up(tiny: PlanningJob) -> None:
    cost = layout_cost(tiny, Layout(2, tensor=2, pipeline=2))
    row = layout_text.brief_table_row(cost, ByteUnit("B", 1), knows_activations=True)
    brief = dict(zip(BRIEF, row, strict=True))
    state = cost.fullest.state
    assert brief["state"] == f"{state.parameters + state.gradients + state.optimizer:,}"
    assert brief["sent"] == f"{cost.busiest.sent_bytes:,}"
    assert (brief["total"], brief["bubble"]) == (f"{cost.fullest.total_bytes:,}", "20.0%")


def test_every_column_is_explained() -> None:
    text = layout_text.legend(knows_activations=True) + " layout"
    named = {"grads": "gradients", "optim": "optimizer state", "total": "Held by the fullest rank"}
    assert all(named.get(column, column) in text for column in COLUMNS)
    assert "not known" in layout_text.legend(knows_activations=False)


def test_refusals_are_counted_in_words() -> None:
    why = Problem("layout.tensor", "16 does not divide the model's 8 heads")
    found = LayoutSearch(
        (Layout(),), (RefusedLayouts("tensor", 24, why), RefusedLayouts("data", 12, replace(why, what="too many")))
    )
    assert layout_text.refused_text(found) == (
        "36 more are not legal for this model and batch: 24 by tensor (16 does not divide the model's 8 heads); "
        "12 by data (too many)."
    )
    assert layout_text.refused_text(LayoutSearch((), (RefusedLayouts("data", 1, why),))).startswith("1 is not legal")


def test_json_says_everything_and_adds_up(tiny: PlanningJob) -> None:
    cost = layout_cost(tiny, Layout(2, zero=3, tensor=2, pipeline=2))
    read = json.loads(json.dumps(layout_text.as_json(cost, is_job=True)))
    full = read["fullest"]
    parts = [*full["buffers"], *full["activations"]]
    state = full["weights_bytes"] + full["gradients_bytes"] + full["optimizer_bytes"]
    assert state + sum(part["bytes"] for part in parts) == full["total_bytes"] == cost.fullest.total_bytes
    assert {row["axis"] for row in full["traffic"]} == {"shard", "tensor", "pipeline", "world"}
    stages = [stage for rank in layout_text.ranks_as_json(cost) for stage in rank["stages"]]
    assert stages == [0, 1]
