"""The picture of a layout: drawn for small and large meshes, whole, and without pyplot."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from closeranks.facts.layout import Layout
from closeranks.plan.layouts import PlanningJob, layout_cost
from closeranks.plan.mesh_picture import draw_layout
from tests.plan.test_layouts import tiny

__all__ = ["tiny"]


def size_of(path: Path) -> tuple[int, int]:
    header = path.read_bytes()[:24]
    assert header.startswith(b"\x89PNG")
    return int.from_bytes(header[16:20], "big"), int.from_bytes(header[20:24], "big")


@pytest.mark.parametrize(
    "layout",
    [
        Layout(),
        Layout(8, zero=3),
        Layout(2, tensor=2, pipeline=2),
        Layout(8, zero=3, shard=2, tensor=2, pipeline=4, schedule="zbv"),
        Layout(256, zero=1),
    ],
    ids=str,
)
def test_a_layout_is_drawn(tiny: PlanningJob, tmp_path: Path, layout: Layout) -> None:
    path = draw_layout(layout_cost(tiny, layout), tmp_path / "mesh.png")
    width, height = size_of(path)
    assert 1000 < width < 4000
    assert 300 < height < 4000
    assert [entry.name for entry in tmp_path.iterdir()] == ["mesh.png"]
    assert "matplotlib.pyplot" not in sys.modules


def test_a_pipeline_has_its_schedule_below_the_mesh(tiny: PlanningJob, tmp_path: Path) -> None:
    """Seen from below: the schedule is the wider band, so the picture is as wide as it."""
    alone = size_of(draw_layout(layout_cost(tiny, Layout(tensor=2)), tmp_path / "alone.png"))
    piped = size_of(draw_layout(layout_cost(tiny, Layout(tensor=2, pipeline=2)), tmp_path / "piped.png"))
    assert piped[1] > alone[1] + 300
