"""The mesh in letters."""

from __future__ import annotations

import pytest

from closeranks.facts.layout import Layout
from closeranks.facts.shapes.model_structure import ModelUnit
from closeranks.plan import mesh_text
from closeranks.plan.layout_text import ByteUnit
from closeranks.plan.layouts import PlanningJob, layout_cost
from tests.plan.test_layouts import tiny

__all__ = ["tiny"]


def test_every_rank_stands_in_the_grid_once(tiny: PlanningJob) -> None:
    lines = list(mesh_text.mesh_lines(layout_cost(tiny, Layout(2, tensor=2, pipeline=2))))
    assert lines[0] == "pipeline 0   stage 0: model.embed_tokens, model.layers.0..3"
    assert lines[1].split() == ["tensor", "0", "tensor", "1"]
    rows = [line.split() for line in lines if line.startswith("  data")]
    assert rows == [["data", "0", "0", "1"], ["data", "1", "2", "3"], ["data", "0", "4", "5"], ["data", "1", "6", "7"]]


@pytest.mark.parametrize(
    ("layout", "name"),
    [(Layout(4), "data 3"), (Layout(4, zero=1), "shard 3"), (Layout(4, zero=3, shard=2), "replica 1 shard 1")],
)
def test_rows_are_named_after_what_their_ranks_share(tiny: PlanningJob, layout: Layout, name: str) -> None:
    assert list(mesh_text.mesh_lines(layout_cost(tiny, layout)))[-1].split()[:-1] == name.split()


def test_a_large_mesh_says_what_it_leaves_out(tiny: PlanningJob) -> None:
    lines = list(mesh_text.mesh_lines(layout_cost(tiny, Layout(64))))
    assert lines[-1].strip() == "... and 52 more data ranks"
    assert len(lines) < 20


def test_groups_are_those_of_the_mesh() -> None:
    lines = [line.split() for line in mesh_text.group_lines(Layout(4, zero=1, shard=2, tensor=4))]
    assert lines == [
        ["replica", "8", "x", "2", "0,8", "1,9", "2,10", "3,11", "4,12", "5,13", "6,14", "7,15"],
        ["shard", "8", "x", "2", "0,4", "1,5", "2,6", "3,7", "8,12", "9,13", "10,14", "11,15"],
        ["tensor", "4", "x", "4", "0-3", "4-7", "8-11", "12-15"],
    ]
    assert list(mesh_text.group_lines(Layout())) == []


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["a"], "a"),
        (["m.0", "m.1", "m.2", "head"], "m.0..2, head"),
        (["m.0", "m.2", "n.3"], "m.0, m.2, n.3"),
        (["m.0", ""], "m.0, modules outside all units"),
    ],
)
def test_numbered_neighbours_stand_together(names: list[str], text: str) -> None:
    assert mesh_text.unit_names([ModelUnit(name, ()) for name in names]) == text


def test_bytes_and_traffic_are_written_out(tiny: PlanningJob) -> None:
    cost = layout_cost(tiny, Layout(2, tensor=2, pipeline=2))
    lines = list(mesh_text.byte_lines(cost, ByteUnit("KiB", 1024), knows_activations=True))
    assert [line.split()[0] for line in lines[:3]] == ["KiB", "pipeline", "pipeline"]
    assert any("activations of blocks" in line for line in lines)
    traffic = list(mesh_text.traffic_lines(cost))
    assert len(traffic) == 1 + len(cost.busiest.volumes)
    assert any("all-gather of hidden states over 2 tensor ranks" in line for line in traffic)
