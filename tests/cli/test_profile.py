"""``closeranks profile`` traces a run that somebody else started, and never waits for one that cannot answer."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from closeranks.core.events import RanksClosed, RunEnded, RunStarted, Warned
from closeranks.telemetry.live.status import RunStatus, StatusWriter, this_process
from closeranks.telemetry.run_log.recorder import EventRecorder, read_events
from closeranks.telemetry.traces.trace_mailbox import TraceMailbox
from tests.cli.calling import Said, call
from tests.cli.commands import FAST, IMPORTABLE, TINY, started, wait_for_line
from tests.run.small import of_kind

ENDLESS = [*FAST, "train.steps=1000000", "telemetry.log_every=1000000", "checkpoint.save=false", "run.folder=run"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "closeranks"]


def begin(folder: Path, *ended: RunEnded) -> Path:
    """The folder of a run without an agent."""
    recorder = EventRecorder(folder, 0)
    for event in (RunStarted(), *ended):
        recorder.emit(event)
    recorder.close()
    return folder


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["nowhere"], "there is no folder nowhere"),
        (["."], ". is not a run folder"),
        (["run", "--steps", "0"], "--steps"),
        (["run", "--out", "trace.txt"], "neither .json nor .json.gz"),
        (["run", "--out", "nowhere/trace.json"], "there is no folder"),
    ],
)
def test_what_cannot_be_meant_is_refused(tmp_path: Path, words: list[str], told: str) -> None:
    begin(tmp_path / "run")
    said = call("profile", *words, cwd=tmp_path)
    assert said.code == 2
    assert told in said.err


def test_a_run_that_has_ended_is_not_asked(tmp_path: Path) -> None:
    begin(tmp_path / "run", RunEnded(5, "finished"))
    said = call("profile", "run", cwd=tmp_path)
    assert (said.code, said.out) == (2, "")
    assert said.err.startswith("closeranks: run has ended (finished). Only a run that is training can be traced")
    assert not (tmp_path / "run" / "traces").exists()


def test_a_run_whose_agent_is_gone_is_not_asked(tmp_path: Path) -> None:
    begin(tmp_path / "run")
    gone = this_process()
    writer = type(gone)(gone.pid, gone.born + 1, gone.host, gone.boot)
    StatusWriter(tmp_path / "run").write(RunStatus(state="running", at=time.time(), writer=writer))
    said = call("profile", "run", cwd=tmp_path)
    assert said.code == 2
    assert "its agent is gone" in said.err


def test_a_run_that_does_not_answer_is_given_up_and_not_asked_later(tmp_path: Path) -> None:
    begin(tmp_path / "run")
    said = call("profile", "run", "--timeout", "1", cwd=tmp_path)
    assert said.code == 2
    assert "run has not answered within 1 s. Is it training? `closeranks status run` shows it." in said.err
    assert not TraceMailbox(tmp_path / "run").is_waiting


def test_one_asks_at_a_time(tmp_path: Path) -> None:
    mailbox = TraceMailbox(begin(tmp_path / "run"))
    with mailbox.claim():
        said = call("profile", "run", cwd=tmp_path)
    assert said.code == 2
    assert "another `closeranks profile` is tracing this run. Wait until it has ended" in said.err


def test_help_teaches(tmp_path: Path) -> None:
    said = call("profile", "--help", cwd=tmp_path)
    assert "closeranks profile runs/tiny --steps 1 --rank 0" in said.out
    assert "ui.perfetto.dev" in said.out


@contextmanager
def under_torchrun(folder: Path) -> Iterator[subprocess.Popen[str]]:
    environ = {**os.environ, **IMPORTABLE, "OMP_NUM_THREADS": "1"}
    with (folder / "output").open("w") as output:
        process = subprocess.Popen(
            [*TORCHRUN, "train", TINY, *ENDLESS], cwd=folder, env=environ, stdout=output, stderr=output, text=True
        )
        try:
            yield process
        finally:
            process.terminate()
            process.wait(120)


def wait_for_steps(folder: Path) -> None:
    """Until rank 0 has recorded a step."""
    path = folder / "run" / "metrics" / "rank-00000.jsonl"
    while not path.exists() or b'"event": "step"' not in path.read_bytes():
        time.sleep(0.05)


def merged(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path) as file:
        found: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return found


def check_trace(folder: Path, said: Said, num_steps: int, ranks: list[int]) -> None:
    assert said.code == 0, said
    (path,) = folder.glob("run/traces/step-*/trace.json.gz")
    events = merged(path)
    steps = [(one["pid"], one["name"]) for one in events if one.get("cat") == "step"]
    first = int(path.parent.name[5:])
    assert steps == [(rank, f"step {step}") for rank in ranks for step in range(first, first + num_steps)]
    assert {one["pid"] for one in events if one["name"] == "aten::mm"} == set(ranks)
    assert f"traces written: {len(ranks)} of {len(ranks)}" in said.out
    assert "ui.perfetto.dev" in said.out
    told = json.loads((path.parent / "summary.json").read_text())
    assert [one["rank"] for one in told["ranks"]] == ranks
    assert all(one["num_steps"] == num_steps and one["device"] is None for one in told["ranks"])
    assert not [one for one in path.parent.iterdir() if one.name.startswith(".")]


@pytest.mark.world
def test_a_run_under_the_agent(tmp_path: Path) -> None:
    with started("train", TINY, "-n", 2, *ENDLESS, cwd=tmp_path) as (process, _):
        wait_for_line(process, "step")
        said = call("profile", "run", "--steps", 2, "--out", "all.json", cwd=tmp_path)
        assert said.code == 0, said
        assert json.loads((tmp_path / "all.json").read_text())["traceEvents"]
        assert "\nall.json: steps " in said.out
        again = call("profile", "run", "--rank", 5, cwd=tmp_path)
        assert again.code == 2
        assert "nothing is traced: there is no rank 5: the run has ranks 0 to 1" in again.err
        one = call("profile", "run", "--steps", 1, "--rank", 1, cwd=tmp_path)
        check_trace(tmp_path, one, 1, [1])
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=120)
    assert process.returncode == 143, err
    assert "Traceback" not in err
    assert "profiler_start" not in err, "torch's own progress is not shown to people"
    assert call("profile", "run", cwd=tmp_path).code == 2


@pytest.mark.world
def test_a_run_under_torchrun(tmp_path: Path) -> None:
    with under_torchrun(tmp_path):
        wait_for_steps(tmp_path)
        said = call("profile", "run", cwd=tmp_path)
    check_trace(tmp_path, said, 3, [0, 1])
    assert of_kind(tmp_path / "run", Warned, 1) == []


@pytest.mark.world
def test_a_worker_that_dies_while_it_is_traced_costs_the_trace_and_nothing_else(tmp_path: Path) -> None:
    hooks = 'run.hooks=["tests.cli.trace_hooks:DiesWhileTraced"]'
    with started("train", TINY, "-n", 2, *ENDLESS, hooks, cwd=tmp_path, env=IMPORTABLE) as (process, _):
        wait_for_line(process, "step")
        said = call("profile", "run", "--steps", 50, cwd=tmp_path)
        assert said.code == 1, said
        assert "not every rank has a trace" in said.err
        assert "rank 1: a rank was lost while it was traced" in said.err
        (folder,) = tmp_path.glob("run/traces/step-*")
        assert not [one.name for one in folder.iterdir() if one.name.startswith(".")], "nothing half-written is left"
        shutil.rmtree(folder)
        check_trace(tmp_path, call("profile", "run", cwd=tmp_path), 3, [0, 1])
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=120)
    assert process.returncode == 143
    agent = read_events(tmp_path / "run" / "metrics" / "agent.jsonl")
    assert sum(isinstance(event, RanksClosed) for _, event in agent) == 1, "it recovered, once"
