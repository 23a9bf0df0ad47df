"""Sinks of real runs: they follow a run over a lost worker, and none of them can stop or change it."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from mlflow import MlflowClient

from closeranks.core.events import RankLost, Warned
from closeranks.telemetry.run_log.recorder import read_events
from tests.cli.calling import call
from tests.cli.commands import TINY
from tests.cli.fault_jobs import STEPS, course, go
from tests.cli.sink_hooks import KILL_AT
from tests.run.small import of_kind
from tests.telemetry.sinks.servers import collector
from tests.telemetry.sinks.test_tensorboard import scalars

MLFLOW = {
    "MLFLOW_ALLOW_FILE_STORE": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
}


@pytest.mark.world
def test_sinks_follow_a_run_over_a_lost_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "mlruns").as_uri()
    with collector() as received:
        done = go(
            tmp_path,
            "telemetry.prometheus.listen=127.0.0.1",
            f"telemetry.otlp.endpoint={received.endpoint}",
            "telemetry.otlp.every_s=0.1",
            "telemetry.mlflow.experiment=tests",
            "telemetry.mlflow.every=1",
            f"telemetry.mlflow.tracking_uri={uri}",
            "telemetry.tensorboard=true",
            'run.hooks=["tests.cli.sink_hooks:ScrapedAndKilled"]',
            env=MLFLOW,
        )
        last = received.latest()
    assert (done.code, done.left_behind) == (0, []), done.err
    run = tmp_path / "run"
    assert [event for _, event in read_events(run / "metrics" / "agent.jsonl") if isinstance(event, RankLost)]
    assert [one.what for one in of_kind(run, Warned) if "telemetry" in one.what] == []
    (before, after) = map(json.loads, (run / "scrapes").read_text().splitlines())
    assert (before[0], after[0]) == (0, 1)
    assert before[1] == after[1], "it is back on its port, although any port would do"
    assert before[2] >= KILL_AT
    assert after[2] >= KILL_AT + 3
    assert last["closeranks.run.step"] == {(): STEPS}
    assert last["closeranks.run.generation"] == {(): 1.0}
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("tests")
    assert experiment is not None
    (one,) = client.search_runs([experiment.experiment_id])
    assert one.info.status == "FINISHED"
    shown = {(point.step, point.value) for point in client.get_metric_history(one.info.run_id, "train/loss")}
    recorded = dict(course(run).losses)
    assert {step for step, _ in shown} >= {*range(1, 4), *range(KILL_AT + 1, STEPS + 1)}
    assert all(recorded[step] == value for step, value in shown)
    assert [step for step, _ in scalars(run)["train/loss"]][-3:] == [STEPS - 2, STEPS - 1, STEPS]


@pytest.mark.world
def test_sinks_that_all_fail_change_no_bit_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    assert go(tmp_path / "plain").code == 0
    (tmp_path / "failing").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = go(
            tmp_path / "failing",
            f"telemetry.prometheus.listen=127.0.0.1:{port}",
            "telemetry.otlp.endpoint=http://127.0.0.1:9",
            "telemetry.mlflow.experiment=tests",
            "telemetry.mlflow.tracking_uri=http://127.0.0.1:9",
            'run.hooks=["tests.cli.sink_hooks:WaitsForWarnings"]',
            env=MLFLOW,
        )
    assert (done.code, done.left_behind) == (0, []), done.err
    run = tmp_path / "failing" / "run"
    told = [one.what for one in of_kind(run, Warned)]
    for name, reason in (("prometheus", "Address already in use"), ("otlp", "refused"), ("mlflow", "refused")):
        (failure,) = [what for what in told if what.startswith(f"telemetry.{name} fails")]
        assert "training continues" in failure
        assert reason in failure
    assert course(run) == course(tmp_path / "plain" / "run")


def test_beyond_loopback_a_run_needs_a_token(tmp_path: Path) -> None:
    said = call("train", TINY, f"run.folder={tmp_path}/run", "telemetry.prometheus.listen=0.0.0.0:9400", cwd=tmp_path)
    assert said.code == 2
    assert "the endpoint needs a token" in said.err
    assert "telemetry.prometheus.token_file" in said.err
    assert not (tmp_path / "run").exists()
