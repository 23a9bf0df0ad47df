"""What an OpenTelemetry collector receives."""

from __future__ import annotations

import logging
import random
from dataclasses import replace
from pathlib import Path

import pytest

from closeranks.core.events import RunEnded, StepPhases
from closeranks.telemetry.config import TelemetryConfig
from closeranks.telemetry.sinks import otlp
from closeranks.telemetry.sinks.config import OtlpConfig
from closeranks.telemetry.sinks.otlp import OtlpSink
from closeranks.telemetry.sinks.sink import SinkContext
from tests.telemetry.conftest import CPU, step
from tests.telemetry.sinks.servers import collector


def opened(folder: Path, endpoint: str, every_s: float = 0.1) -> OtlpSink:
    sink = OtlpSink(SinkContext(folder, TelemetryConfig(otlp=OtlpConfig(endpoint=endpoint, every_s=every_s))))
    sink.open()
    return sink


def test_a_collector_receives_values_and_totals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20abc")
    with collector() as received:
        sink = opened(tmp_path, received.endpoint)
        sink.handle([replace(CPU, folder=str(tmp_path)), *(step(number, loss=float(number)) for number in (1, 2, 3))])
        sink.handle([StepPhases(3, 0.1, {"forward": 0.1}), RunEnded(step=3)])
        sink.close()
        found = received.latest()
        assert received.paths == {"/v1/metrics"}
        assert received.headers["authorization"] == "Bearer abc"
        assert received.resource()["service.name"] == "closeranks"
        assert received.resource()["closeranks.run"] == tmp_path.name
    assert found["closeranks.train.loss"] == {(): 3.0}
    assert found["closeranks.train.items_per_s"] == {(): pytest.approx(10_000)}
    assert found["closeranks.step.items.total"] == {(): 3000.0}
    assert found["closeranks.phase.seconds"] == {(("phase", "forward"),): 0.1}
    assert found["closeranks.events.total"][(("event", "step"),)] == 3.0


def test_what_a_collector_missed_is_in_the_next_export(tmp_path: Path) -> None:
    with collector() as received:
        received.status = 400
        sink = opened(tmp_path, received.endpoint)
        with pytest.raises(ConnectionError, match="400"):
            sink.handle([CPU, step(1)])
        received.status = 200
        sink.open()
        sink.handle([RunEnded(step=1)])
        assert received.latest()["closeranks.step.items.total"] == {(): 1000.0}
        sink.close()


def test_a_collector_that_is_gone_is_an_error_with_a_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(otlp, "_TIMEOUT_S", 2.0)
    with collector() as received:
        pass
    sink = opened(tmp_path, received.endpoint, every_s=1000.0)
    for number in (1, 2):  # the second call exports again, although the interval is not over
        with pytest.raises(ConnectionError, match=r"^Connection refused$"):
            sink.handle([CPU, step(number)])
    with pytest.raises(ConnectionError):
        sink.close()
    assert [one for one in caplog.records if one.name.startswith("opentelemetry")] == [], "and nothing is printed"
    assert logging.getLogger("opentelemetry.exporter.otlp").propagate


def test_an_export_leaves_the_random_numbers_of_the_user_alone(tmp_path: Path) -> None:
    with collector() as received:
        sink = opened(tmp_path, received.endpoint)
        before = random.getstate()
        sink.handle([CPU, step(1), RunEnded(step=1)])
        sink.close()
        assert len(received.requests) == 2
    assert random.getstate() == before
