"""``examples/tiny.toml`` is legal under every layout of up to eight ranks, and small enough to train in seconds."""

from pathlib import Path

import pytest

from closeranks.facts.layout import Layout, legal_problems
from closeranks.run.job.job import layout_constraints, load_job, micro_batch_size
from tests.facts.powers import layouts_of_powers

TINY = Path(__file__).parents[2] / "examples" / "tiny.toml"
LAYOUTS = [layout for size in range(1, 9) for layout in layouts_of_powers(size)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_tiny_is_legal_under(layout: Layout) -> None:
    job = load_job(TINY).value
    assert legal_problems(layout, layout_constraints(job, micro_batch_size(job))) == ()


def test_every_axis_is_among_them() -> None:
    assert {layout.data for layout in LAYOUTS} == set(range(1, 9))
    for axis in ("tensor", "pipeline", "context"):
        assert {getattr(layout, axis) for layout in LAYOUTS} == {1, 2, 4, 8}
    assert {layout.zero for layout in LAYOUTS} == {0, 1, 2, 3}
