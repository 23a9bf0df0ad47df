"""The latest values and the totals of a run."""

from __future__ import annotations

from closeranks.core.events import StepPhases
from closeranks.telemetry.sinks.metric_table import MetricTable
from tests.telemetry.conftest import step


def test_the_latest_step_replaces_the_one_before_and_totals_grow() -> None:
    table = MetricTable()
    table.update([step(1, loss=1.0), step(2, loss=2.0)])
    table.update([step(3, loss=3.0)])
    assert [one.value for one in table.latest() if one.name == "train/loss"] == [3.0]
    assert {name: value for name, _, value in table.totals()}["step/items"] == 3000.0


def test_a_phase_that_a_step_does_not_have_is_gone_and_its_total_stays() -> None:
    table = MetricTable()
    table.update([StepPhases(1, 3.0, {"forward": 1.0, "evaluation": 2.0})])
    table.update([StepPhases(2, 1.5, {"forward": 1.5})])
    assert {one.path: one.value for one in table.latest()} == {"phase/step_seconds": 1.5, "phase/forward": 1.5}
    totals = {dict(labels).get("phase"): value for name, labels, value in table.totals() if name == "phase/seconds"}
    assert totals == {"forward": 2.5, "evaluation": 2.0}
