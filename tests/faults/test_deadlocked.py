"""A dataset that never returns a sample: the rank that waits is named with the line of the user's code, and the run
ends by the rule for what happens again and again, with its state kept."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from closeranks.agent.detection.process_probe import ask_children_for_stacks, data_read_location
from closeranks.core.events import RankLost
from closeranks.run.state.restore_rescued import find_rescued
from closeranks.telemetry.run_log.recorder import read_events
from tests.cli.commands import closeranks
from tests.cli.fault_jobs import IMPORTABLE
from tests.faults import deadlocked

pytestmark = [pytest.mark.world, pytest.mark.timeout(300)]
JOB = """
[run]
folder = "run"
[model]
name = "tests.faults.deadlocked:model"
loss = "tests.faults.deadlocked:loss"
[data]
name = "tests.faults.deadlocked:Locked"
[train]
steps = 40
global_batch = 4
[checkpoint]
every = 0
[telemetry]
report = false
[elastic]
snapshot_every = 1
hang_floor_s = 0.3
hang_factor = 100
"""
"""The factor keeps a busy machine from being taken for a hang: only waiting for data has ten times the floor."""
SCRIPT = """
from closeranks import train
from tests.faults import deadlocked

if __name__ == "__main__":
    how = {"steps": 40, "global_batch": 4}
    train(deadlocked.model, deadlocked.Locked(), deadlocked.loss, train=how, loading={"workers": 1})
"""
LINES, FIRST = inspect.getsourcelines(deadlocked.Locked)
PLACE = f"deadlocked.py:{FIRST + max(n for n, line in enumerate(LINES) if '.acquire()' in line)} in __getitem__"


IN_PROCESSES = ("data.workers=1", "elastic.hang_floor_s=2", "elastic.hang_factor=3")
"""The first wait for data starts those processes, and a multiple of it is what later waits have."""


@pytest.mark.parametrize(
    "settings", [(), pytest.param(IN_PROCESSES, marks=pytest.mark.slow)], ids=["in a thread", "in processes"]
)
@pytest.mark.timeout(600)
def test_it_is_named_and_not_tried_for_ever(tmp_path: Path, settings: tuple[str, ...]) -> None:
    (tmp_path / "job.toml").write_text(JOB)
    done = closeranks("train", "job.toml", "-n", 2, *settings, cwd=tmp_path, env=IMPORTABLE, timeout_s=500)
    assert done.code == 1, done.out + done.err
    first, *_ = done.err.splitlines()
    assert "failed 2 times in the same way" in first
    assert "This is deterministic" in first
    assert "waiting for data; reading a sample at" in first
    assert PLACE in first
    assert "The state in memory was written to" in done.err
    assert "most recent call first" not in done.out, "stacks are for the log"
    lost = [event for _, event in read_events(tmp_path / "run/metrics/agent.jsonl") if isinstance(event, RankLost)]
    assert [one.kind for one in lost] == ["hang", "hang"]
    assert len({(one.rank, one.step) for one in lost}) == 1
    assert PLACE in lost[0].cause
    assert "__getitem__" in (tmp_path / f"run/logs/rank-{lost[0].rank:05d}.log").read_text()
    rescued = find_rescued(tmp_path / "run")
    assert rescued is not None
    assert lost[0].step is not None
    assert rescued.step >= lost[0].step - 2, "no step but the last is done again"


def test_processes_that_read_tell_where_they_are(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    told, place = tmp_path / "told", ""
    with told.open("w") as file:
        command = [sys.executable, str(script)]
        process = subprocess.Popen(
            command, cwd=tmp_path, env={**os.environ, **IMPORTABLE, "OMP_NUM_THREADS": "1"}, stdout=file, stderr=file
        )
        try:
            while not place:
                assert process.poll() is None, told.read_text()
                ask_children_for_stacks(process.pid)
                time.sleep(0.2)
                found = data_read_location(told.read_text().splitlines()[-60:])
                place = found if PLACE in found else ""
        finally:
            process.kill()
            process.wait()
