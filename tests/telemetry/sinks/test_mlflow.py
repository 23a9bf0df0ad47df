"""What MLflow's own client reads of a run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from closeranks.core.events import Evaluated, Event, RunEnded, StepPhases
from closeranks.telemetry.config import TelemetryConfig
from closeranks.telemetry.sinks.config import MlflowConfig
from closeranks.telemetry.sinks.mlflow import MlflowSink
from closeranks.telemetry.sinks.sink import SinkContext
from tests.telemetry.conftest import CPU, step

JOB = {"optim": {"lr": 0.1, "betas": [0.9, 0.95]}, "run": {"name": "x" * 1000}}


@dataclass(frozen=True, slots=True)
class Interval(Event):
    name: ClassVar[str] = "interval"
    seconds: float = 0.0


@pytest.fixture(autouse=True)
def file_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow's files need no database, and since 3.7 this word."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")


def opened(folder: Path, every: int = 1) -> MlflowSink:
    folder.mkdir(exist_ok=True)
    uri = (folder.parent / "mlruns").as_uri()
    config = TelemetryConfig(mlflow=MlflowConfig(experiment="tests", tracking_uri=uri, every=every))
    sink = MlflowSink(SinkContext(folder, config, job=JOB))
    sink.open()
    return sink


def reader(tmp_path: Path) -> MlflowClient:
    return MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())


def runs(tmp_path: Path) -> list:
    client = reader(tmp_path)
    experiment = client.get_experiment_by_name("tests")
    assert experiment is not None
    return list(client.search_runs([experiment.experiment_id]))


def history(tmp_path: Path, run_id: str, name: str) -> list[tuple[int, float]]:
    return [(one.step, one.value) for one in reader(tmp_path).get_metric_history(run_id, name)]


def test_series_parameters_and_the_end(tmp_path: Path) -> None:
    sink = opened(tmp_path / "tiny", every=2)
    sink.handle([CPU, *(step(number, loss=float(number), metrics={"top@5": 0.5}) for number in range(1, 6))])
    sink.handle([StepPhases(4, 0.1, {"forward": 0.1}), Interval(7.0), Evaluated(5, 0.5, 8.0, {"accuracy": 0.9})])
    sink.handle([RunEnded(5)])
    sink.close()
    (run,) = runs(tmp_path)
    assert run.info.run_name == "tiny"
    assert run.info.status == "FINISHED"
    assert run.data.params["optim.lr"] == "0.1"
    assert run.data.params["optim.betas"] == "[0.9, 0.95]"
    assert len(run.data.params["run.name"]) == 500
    assert history(tmp_path, run.info.run_id, "train/loss") == [(2, 2.0), (4, 4.0)]
    assert history(tmp_path, run.info.run_id, "train/top_5") == [(2, 0.5), (4, 0.5)]
    assert history(tmp_path, run.info.run_id, "phase/forward") == [(4, 0.1)]
    assert history(tmp_path, run.info.run_id, "eval/accuracy") == [(5, 0.9)], "at a step that is not a second one"
    assert history(tmp_path, run.info.run_id, "interval/seconds") == [(5, 7.0)], "an event without a step"
    assert history(tmp_path, run.info.run_id, "run/world_size") == [(0, 2.0)]
    assert history(tmp_path, run.info.run_id, "train/items_per_s")[0][1] == pytest.approx(10_000)


def test_another_generation_continues_the_run(tmp_path: Path) -> None:
    first = opened(tmp_path / "tiny")
    first.handle([CPU, step(1)])
    first.close()
    (run,) = runs(tmp_path)
    assert run.info.status == "RUNNING", "it has not ended"
    again = opened(tmp_path / "tiny")
    again.handle([replace(CPU, generation=1, first_step=1), step(2), RunEnded(step=2, reason="failed")])
    again.close()
    (run,) = runs(tmp_path)
    assert run.info.status == "FAILED"
    assert [number for number, _ in history(tmp_path, run.info.run_id, "train/loss")] == [1, 2]
    other = opened(tmp_path / "other")
    other.close()
    assert len(runs(tmp_path)) == 2


def test_a_run_that_was_deleted_is_an_error(tmp_path: Path) -> None:
    opened(tmp_path / "tiny").close()
    (tmp_path / "tiny" / "sinks.json").write_text('{"mlflow": "0123456789abcdef0123456789abcdef"}')
    with pytest.raises(MlflowException, match="not found"):
        opened(tmp_path / "tiny")


def test_more_metrics_than_one_request_may_hold(tmp_path: Path) -> None:
    sink = opened(tmp_path / "tiny")
    sink.handle([StepPhases(1, 1.0, {f"phase-{number}": 1.0 for number in range(2500)})])
    sink.close()
    (run,) = runs(tmp_path)
    assert len(run.data.metrics) == 2501
