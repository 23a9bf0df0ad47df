"""Llama 3 70B in both memory conventions: the table of docs/plan-models.md is what the estimate says."""

from __future__ import annotations

import pytest

from closeranks.core.errors import ConfigError
from closeranks.facts.cluster import parse_cluster
from closeranks.facts.layout import Layout
from closeranks.facts.shapes.llama import PRESETS
from closeranks.facts.shapes.transformer import from_llama
from closeranks.plan.memory.conventions import LEAN_12, MIXED_16, StateConvention, find_convention
from closeranks.plan.memory.estimate import memory_estimate
from closeranks.plan.step_time.workload import PlanChoice, Workload
from tests.cli.commands import ROOT

ROWS = {
    "whole model": ("data=1", "1,129 GB", "847 GB"),
    "on each of 64, ZeRO-3": ("data=64 zero=3", "17.6 GB", "13.2 GB"),
    "on the fullest of tensor 8 x pipeline 4 x data 2, ZeRO-1": (
        "data=2 tensor=8 pipeline=4 zero=1",
        "22.7 GB",
        "18.2 GB",
    ),
    "on each of tensor 8 x data 8, ZeRO-1": ("data=8 tensor=8 zero=1", "48.5 GB", "44.1 GB"),
}


@pytest.mark.parametrize("row", ROWS)
def test_the_page_has_70b_in_both(row: str) -> None:
    text, sixteen, twelve = ROWS[row]
    assert f"| {row} | {sixteen} | {twelve} |" in (ROOT / "docs" / "plan-models.md").read_text()
    layout = Layout.parse(text)
    for convention, shown in ((MIXED_16, sixteen), (LEAN_12, twelve)):
        number = state_gb(layout, convention)
        assert (f"{number:,.0f} GB" if number > 100 else f"{number:.1f} GB") == shown


def state_gb(layout: Layout, convention: StateConvention) -> float:
    work = Workload(from_llama(PRESETS["70b"]), 4096, 1024)
    choice, cluster = PlanChoice(layout, recompute="full"), parse_cluster(f"{layout.num_ranks}xh100")
    found = memory_estimate(work, choice, cluster, convention)
    return sum(found.part(name) for name in ("weights", "gradients", "optimizer")) / 1e9


def test_an_unknown_convention_gets_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="mixed-16"):
        find_convention("mixed16")
