"""``closeranks status`` tells how a run stands, and never claims what it cannot know."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from closeranks.core.events import RunStarted, StepDone
from closeranks.telemetry.live.status import RunStatus, StatusEvent, StatusWriter, WorkerStatus, this_process
from closeranks.telemetry.run_log.recorder import EventRecorder
from tests.cli.calling import call
from tests.cli.commands import TINY, closeranks, started, wait_for_line

AGENT = """
import sys, time
from pathlib import Path
from closeranks.telemetry.live.status import RunStatus, StatusWriter, this_process
writer = StatusWriter(Path(sys.argv[1]))
status = {"run": sys.argv[1], "num_steps": 40, "writer": this_process(), "began_at": time.time()}
for word in sys.stdin:
    state, step = word.split()
    writer.write(RunStatus(state=state, step=int(step), at=time.time(), **status))
    print(word, end="", flush=True)
"""


class Agent:
    """A process of its own that writes the status it is told to."""

    def __init__(self, folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", AGENT, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def tell(self, state: str, step: int) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{state} {step}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == f"{state} {step}\n"


@contextmanager
def agent(folder: Path) -> Iterator[Agent]:
    folder.mkdir(parents=True, exist_ok=True)
    writing = Agent(folder)
    try:
        yield writing
    finally:
        writing.process.kill()
        writing.process.communicate()


def own_status(folder: Path) -> RunStatus:
    return RunStatus(
        run=str(folder),
        state="running",
        writer=this_process(),
        at=time.time() + 60,  # still fresh when a busy machine reads it
        began_at=time.time() - 34,
        generation=1,
        world_size=1,
        step=12,
        num_steps=40,
        workers=(WorkerStatus(0, "here", os.getpid(), 13, "computing gradients", 0.04, 1 << 30),),
        happened=(StatusEvent(time.time(), "rank 1 lost at step 11 (killed by SIGKILL); closed ranks in 0.9 s"),),
    )


def test_a_run_that_is_under_way(tmp_path: Path) -> None:
    StatusWriter(tmp_path).write(own_status(tmp_path))
    said = call("status", tmp_path)
    assert said.code == 0
    assert said.out.startswith(f"{tmp_path}: running, step 12 of 40, generation 1\nagent {os.getpid()} on ")
    assert "computing gradients" in said.out
    assert "closed ranks in 0.9 s" in said.out


def test_json_is_one_object_with_what_is_known_of_its_writer(tmp_path: Path) -> None:
    StatusWriter(tmp_path).write(own_status(tmp_path))
    told = json.loads(call("status", tmp_path, "--json").out)
    assert told["heard"] == "now"
    assert told["age_s"] < 5
    assert told["workers"][0]["pid"] == os.getpid()


def test_an_agent_that_was_killed_is_not_taken_at_its_word(tmp_path: Path) -> None:
    with agent(tmp_path) as running:
        running.tell("running", 7)
        assert ": running, step 7 of 40" in call("status", tmp_path).out
        running.process.send_signal(signal.SIGKILL)
        running.process.wait()
        said = call("status", tmp_path)
    assert said.code == 0
    assert "last heard" in said.out
    assert f"process {running.process.pid} on " in said.out
    assert "is gone and did not report how the run ended" in said.out
    assert json.loads(call("status", tmp_path, "--json").out)["heard"] == "gone"


def test_a_file_from_another_machine_is_told_with_its_age(tmp_path: Path) -> None:
    status = own_status(tmp_path)
    far = replace(status.writer, host="another.example")
    StatusWriter(tmp_path).write(replace(status, writer=far, at=time.time() - 3 * 3600))
    said = call("status", tmp_path)
    assert "last heard 3 h 0 min ago (step 12 of 40, generation 1)" in said.out
    assert "on another.example, cannot be checked from this machine" in said.out


def test_a_run_without_an_agent_is_told_by_its_metrics(tmp_path: Path) -> None:
    recorder = EventRecorder(tmp_path, 0)
    recorder.emit(RunStarted(last_step=60, world_size=2))
    recorder.emit(StepDone(step=41))
    recorder.close()
    assert "(step 41 of 60, generation 0): no agent watches it" in call("status", tmp_path).out


def test_a_folder_that_is_no_run_is_refused_in_a_sentence(tmp_path: Path) -> None:
    said = call("status", tmp_path)
    assert said.code == 2
    assert f"{tmp_path} is not a run folder" in said.err
    said = call("status", tmp_path / "nowhere")
    assert said.code == 2
    assert "there is no folder" in said.err


def test_without_a_folder_it_is_the_newest_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said = call("status")
    assert said.code == 2
    assert "there is no run under runs/" in said.err
    for name, at in (("old", 100), ("new", 200)):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        StatusWriter(folder).write(replace(own_status(folder), run=f"runs/{name}"))
        os.utime(folder / "status.json", (at, at))
    assert call("status").out.startswith("runs/new: ")


def test_watching_tells_every_change_until_the_end(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with agent(run) as running:
        running.tell("running", 7)
        with started("status", "run", "--watch", cwd=tmp_path) as (process, _):
            wait_for_line(process, "running, step 7 of 40")
            running.tell("running", 8)
            wait_for_line(process, "running, step 8 of 40")
            running.tell("finished", 40)
            wait_for_line(process, "finished")
            assert process.wait(timeout=60) == 0


def test_ctrl_c_leaves_watching_in_peace(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with agent(run) as running:
        running.tell("running", 7)
        with started("status", "run", "--watch", "--json", cwd=tmp_path) as (process, _):
            assert json.loads(wait_for_line(process, "{"))["step"] == 7
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=60)
            assert process.returncode == 0
            assert err == ""


@pytest.mark.world
def test_a_real_run_is_seen_at_work_and_afterwards(tmp_path: Path) -> None:
    quick = ["model.num_layers=2", "train.eval_every=0", "telemetry.log_every=1", "telemetry.report=false"]
    with started("train", TINY, "-n", 2, "train.steps=100000", *quick, "run.folder=run", cwd=tmp_path) as (process, _):
        wait_for_line(process, "step     5/")
        told = json.loads(call("status", "run", "--json", cwd=tmp_path).out)
        assert told["heard"] == "now"
        assert told["state"] == "running"
        assert [worker["rank"] for worker in told["workers"]] == [0, 1]
        for worker in told["workers"]:
            assert Path(f"/proc/{worker['pid']}").exists()
            assert worker["memory_bytes"] > 1 << 20
        assert told["writer"]["pid"] == process.pid
        assert 1 <= told["step"] < 100_000
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=300)
    said = call("status", "run", cwd=tmp_path)
    assert said.out.startswith("run: interrupted ")


@pytest.mark.world
def test_a_fault_is_among_the_last_events(tmp_path: Path) -> None:
    quick = ["model.num_layers=2", "train.eval_every=0", "telemetry.log_every=1", "telemetry.report=false"]
    with started("train", TINY, "-n", 2, "train.steps=100000", *quick, "run.folder=run", cwd=tmp_path) as (process, _):
        wait_for_line(process, "step     5/")
        told = json.loads(closeranks("status", "run", "--json", cwd=tmp_path).out)
        os.kill(told["workers"][1]["pid"], signal.SIGKILL)
        line = wait_for_line(process, "closed ranks in").strip()
        assert line.startswith("rank 1 lost at step ")
        assert " (killed by SIGKILL); closed ranks in " in line
        wait_for_line(process, "step ")
        told = json.loads(closeranks("status", "run", "--json", cwd=tmp_path).out)
        assert told["generation"] == 1
        assert told["happened"][-1]["text"] == line
        assert told["account"]["num_faults"] == 1
        assert 0 < told["goodput"] < 1
        assert told["device_hours"] == pytest.approx(told["account"]["worker_s"] / 3600)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=300)
    agent_lines = (tmp_path / "run" / "metrics" / "agent.jsonl").read_text().splitlines()
    told = [json.loads(text)["event"] for text in agent_lines]
    assert (told[:3], told[-1]) == (["launched", "rank_lost", "ranks_closed"], "launch_ended")
