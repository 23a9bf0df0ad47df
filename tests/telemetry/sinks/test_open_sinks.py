"""Which sinks a job asks for, and what happens if one cannot be made."""

from __future__ import annotations

from pathlib import Path

import pytest

from closeranks.core.errors import SetupError
from closeranks.core.events import Evaluated, RunEnded, Warned
from closeranks.telemetry.config import TelemetryConfig
from closeranks.telemetry.run_log.recorder import EventRecorder, read_events
from closeranks.telemetry.sinks.config import OtlpConfig, PrometheusConfig
from closeranks.telemetry.sinks.open_sinks import is_on, open_sinks
from closeranks.telemetry.sinks.sink import SINKS, SinkContext, SinkMemory
from tests.telemetry.conftest import CPU, step
from tests.telemetry.sinks.servers import collector
from tests.telemetry.sinks.test_tensorboard import scalars


def warnings(folder: Path) -> list[str]:
    return [one.what for _, one in read_events(folder / "metrics" / "rank-00000.jsonl") if isinstance(one, Warned)]


def test_every_sink_has_a_key_and_is_off_by_default() -> None:
    assert set(SINKS) == {"tensorboard", "prometheus", "otlp", "mlflow", "wandb"}
    assert not any(is_on(TelemetryConfig(), name) for name in SINKS)


def test_several_sinks_get_the_same_events(tmp_path: Path) -> None:
    recorder = EventRecorder(tmp_path, 0)
    with collector() as received:
        config = TelemetryConfig(tensorboard=True, otlp=OtlpConfig(endpoint=received.endpoint))
        sinks = open_sinks(recorder, SinkContext(tmp_path, config, recorder.emit), must_open=True)
        for event in (CPU, step(1, loss=1.0), step(2, loss=2.0), Evaluated(2, 0.5), RunEnded(2)):
            recorder.emit(event)
        sinks.close()
        assert received.latest()["closeranks.train.loss"] == {(): 2.0}
    recorder.close()
    assert scalars(tmp_path)["train/loss"] == [(1, 1.0), (2, 2.0)]
    assert warnings(tmp_path) == []


def test_what_the_user_must_fix_ends_a_run_only_before_it_has_begun(tmp_path: Path) -> None:
    recorder = EventRecorder(tmp_path, 0)
    config = TelemetryConfig(prometheus=PrometheusConfig(listen="0.0.0.0:0", token_file=str(tmp_path / "none")))
    context = SinkContext(tmp_path, config, recorder.emit)
    with pytest.raises(SetupError, match="token file"):
        open_sinks(recorder, context, must_open=True)
    open_sinks(recorder, context, must_open=False).close()
    recorder.close()
    (text,) = warnings(tmp_path)
    assert text.startswith("telemetry.prometheus is disabled until the run is started again: the token file")


def test_a_memory_that_is_damaged_is_empty(tmp_path: Path) -> None:
    memory = SinkMemory(tmp_path)
    memory.put("mlflow", "abc")
    memory.put("wandb", "def")
    assert (memory.get("mlflow"), memory.get("wandb"), memory.get("other")) == ("abc", "def", "")
    for text in ("", "[", "[1]", '{"mlflow": 3}', "\x00"):
        (tmp_path / "sinks.json").write_text(text)
        assert memory.get("mlflow") == ""
