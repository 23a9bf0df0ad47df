"""Pictures of plans: every part has a kind, colours are not shared, and nothing is cut off or drawn over bars."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product
from typing import Any

import pytest

from closeranks.facts.layout import Layout
from closeranks.plan.picture_style import new_figure
from closeranks.plan.scaling.scaling import scale_curves
from closeranks.plan.scaling.scaling_picture import scaling_figure
from closeranks.plan.search.cost_curve import cost_points
from closeranks.plan.search.costs import CostBasis
from closeranks.plan.search.part_kinds import COLORS, OTHER, kind_of, memory_by_kind, time_by_kind
from closeranks.plan.search.plan_picture import plans_figure
from closeranks.plan.search.search import PlanEstimator, search_plans
from closeranks.plan.step_time.workload import PlanChoice
from tests.plan.search.test_search import question


def test_every_part_has_a_kind_and_every_kind_its_own_colour() -> None:
    estimator = PlanEstimator(question("8b", "16xh100"))
    plain = PlanChoice(Layout())
    layouts = [Layout(16), *(Layout(4, zero, tensor=2, pipeline=2) for zero in range(4)), Layout(8, 3, 2, tensor=2)]
    for layout, recompute, size in product(layouts, ("none", "selective", "full"), (1, 4)):
        plan = estimator.plan(replace(plain, layout=layout, recompute=recompute, micro_batch=size))  # type: ignore[arg-type]
        for part in (*plan.step.parts, *plan.memory.parts):
            assert kind_of(part.name) != OTHER, part.name
        assert abs(sum(time_by_kind(plan).values()) - plan.step.seconds) < 1e-9 * plan.step.seconds
        assert sum(memory_by_kind(plan).values()) == plan.memory.total_bytes
    assert len(set(COLORS.values())) == len(COLORS)
    assert kind_of("something new") == OTHER


def test_labels_and_legends_of_plans_have_room() -> None:
    asked = question("70b", "128xh100")
    result = search_plans(asked)
    points = cost_points(asked, CostBasis(70e9, 256, 4096, 1e12), (64, 128, 256))
    figure = plans_figure("plans", result.plans, result.winner, asked.cluster.device.memory_bytes, points, "USD")
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert any("\n" in label for label in labels)
    assert sum(label.startswith("*") for label in labels) == 1
    assert_roomy(figure)


def test_labels_and_legends_of_scaling_have_room() -> None:
    curves = scale_curves(question("70b", "64xh100"), (8, 16, 32, 64), 64)
    figure = scaling_figure("scaling", curves, "tokens", 4096)
    throughput, strong = figure.axes[:2]
    assert [label.get_text() for label in throughput.get_xticklabels()] == ["8", "16", "32", "64"]
    assert [text.get_text() for text in strong.texts] == ["nothing fits"]
    assert all(bar.get_height() <= 1 for bar in strong.patches)
    assert_roomy(figure)


def assert_roomy(figure: Any) -> None:
    """Nothing leaves the picture, and no legend below lies over the axes above, nor over another one."""
    figure.canvas.draw()
    above = [axes for axes in figure.axes if axes.axison]
    legends = [axes.get_legend().get_window_extent() for axes in figure.axes if not axes.axison]
    for box in (*(axes.get_tightbbox() for axes in above), *legends):
        assert box.x0 >= 0
        assert box.y0 >= 0
        assert box.x1 <= figure.bbox.x1
        assert box.y1 <= figure.bbox.y1
    assert all(box.y1 <= axes.bbox.y0 for box in legends for axes in above)
    assert not any(one.overlaps(other) for one, other in combinations(legends, 2))


def test_a_label_that_is_cut_off_is_noticed() -> None:
    figure = new_figure("wide", (6.0, 3.0))
    figure.set_layout_engine("none")
    figure.add_subplot().set_yticks([0.0], ["as wide as this " * 9])
    with pytest.raises(AssertionError):
        assert_roomy(figure)
