"""Which metrics an event has, and what they are called."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import ClassVar

import pytest

from closeranks.core.events import Evaluated, Event, RunStarted, Saved, StepDone, StepPhases, Warned
from closeranks.telemetry.sinks.metrics import Metric, Rates, additions_of, otlp_name, prometheus_name, values_of
from tests.telemetry.conftest import CPU, step


@dataclass(frozen=True, slots=True)
class DiskSeen(Event):
    """An event that nothing in the package knows."""

    name: ClassVar[str] = "disk"
    step: int = 0
    host: str = ""
    read_s: float = 0.0
    is_full: bool = False
    free_share: float | None = None
    what: str = ""
    bytes: dict[str, float] = field(default_factory=dict)
    queues: dict[str, dict[str, int]] = field(default_factory=dict)


def latest(event: Event) -> dict[str, float]:
    return {one.path: one.value for one in values_of(event)}


def totals(event: Event) -> dict[str, float]:
    return {name: value for name, _, value in additions_of(event)}


def test_a_step_is_a_curve_and_what_it_took() -> None:
    found = latest(step(3, loss=1.5, metrics={"accuracy": 0.5}, data_wait_s=0.25, taken=False))
    assert found["train/loss"] == 1.5
    assert found["train/accuracy"] == 0.5
    assert found["step/data_wait_s"] == 0.25
    assert found["step/taken"] == 0.0
    assert found["run/step"] == 3.0
    assert totals(step(3)) == {
        "step/items": 1000.0, "step/seconds": 0.1, "step/data_wait_s": 0.001, "step/num_bad": 0.0, "events": 1.0,
    }  # fmt: skip


def test_phases_have_a_label_and_add_up() -> None:
    event = StepPhases(7, 0.3, {"forward": 0.1, "data.all_reduce": 0.2})
    assert latest(event) == {"phase/step_seconds": 0.3, "phase/forward": 0.1, "phase/data.all_reduce": 0.2}
    one = Metric("phase/seconds", 0.1, "phase/forward", (), (("phase", "forward"),))
    assert one in values_of(event)
    assert ("phase/seconds", (("phase", "forward"),), 0.1) in additions_of(event)


def test_an_evaluation_and_a_save() -> None:
    assert latest(Evaluated(4, 0.5, 8.0, {"accuracy": 0.9}, 1.0)) == {
        "eval/loss": 0.5, "eval/weight": 8.0, "eval/accuracy": 0.9, "eval/seconds": 1.0, "eval/num_bad": 0.0,
    }  # fmt: skip
    saved = {one.name: one for one in values_of(Saved(4, "p", 10, 2.0, 0.5, "remote"))}
    assert saved["saved/bytes"].labels == (("tier", "remote"),)
    assert saved["saved/bytes"].path == "saved/bytes/tier-remote"


def test_fields_of_an_event_that_nothing_knows_are_metrics() -> None:
    event = DiskSeen(5, "a", 0.5, True, None, "busy", {"read": 3.0}, {"sda": {"depth": 2}})
    assert latest(event) == {
        "disk/read_s/host-a": 0.5, "disk/is_full/host-a": 1.0, "disk/bytes/read/host-a": 3.0,
        "disk/queues/sda.depth/host-a": 2.0,
    }  # fmt: skip
    (read,) = [one for one in values_of(event) if one.name == "disk/bytes"]
    assert read.labels == (("host", "a"), ("byte", "read"))


def test_a_start_describes_the_run() -> None:
    (info,) = [one for one in values_of(RunStarted(folder="/runs/tiny", device="H200")) if one.name == "run/info"]
    assert ("run", "tiny") in info.labels
    assert ("device", "H200") in info.labels
    assert latest(RunStarted(rank=3, world_size=8))["run/world_size"] == 8.0
    assert "run/rank" not in latest(RunStarted())


def test_an_event_without_numbers_is_counted() -> None:
    assert list(values_of(Warned("what", 3))) == []
    assert list(additions_of(Warned("what", 3))) == [("events", (("event", "warning"),), 1.0)]


def test_rates_need_the_events_before() -> None:
    rates = Rates()
    rates.observe(CPU)
    assert "train/items_per_s" not in {one.name for one in rates.observe(step(1))}
    found = {one.name: one.value for one in rates.observe(step(2))}
    assert found["train/items_per_s"] == pytest.approx(10_000)
    assert found["run/eta_s"] == pytest.approx(3.8)
    assert "train/mfu" not in found, "no datasheet is known"


def test_a_value_that_is_not_finite_stays() -> None:
    assert math.isnan(latest(StepDone(step=1, loss=math.nan))["train/loss"])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("train/loss", "closeranks_train_loss"),
        ("step/data_wait_s", "closeranks_step_data_wait_seconds"),
        ("train/items_per_s", "closeranks_train_items_per_second"),
        ("a-b.c/µ", "closeranks_a_b_c"),
    ],
)
def test_names_for_prometheus(name: str, expected: str) -> None:
    assert prometheus_name(name) == expected
    assert prometheus_name(name, adds=True) == f"{expected}_total"


def test_every_name_is_legal_everywhere() -> None:
    for event in (CPU, step(1), StepPhases(1, 1.0, {"x": 1.0}), Evaluated(), Saved(), DiskSeen(bytes={"é ü": 1.0})):
        for name in {one.name for one in values_of(event)} | {name for name, _, _ in additions_of(event)}:
            assert re.fullmatch(r"[a-z_][a-z0-9_]*", prometheus_name(name))
            assert re.fullmatch(r"[a-z][a-z0-9_.]*", otlp_name(name))
