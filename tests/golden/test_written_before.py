"""What earlier versions wrote is still read: job files, event files, and checkpoints that a run is continued from.

Each folder of ``written_before`` was made by the code of an earlier commit (its README says which). That run went on to
its end, so what a continuation from its middle must come to is known.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from closeranks import Session
from closeranks.run.job.job import load_job
from closeranks.run.loop import run_session
from closeranks.telemetry.run_log.sample_log import read_samples
from closeranks.testing import run_world
from tests.cli.calling import call
from tests.cli.commands import closeranks
from tests.golden.record import environment
from tests.hostile.checks import State, difference, read_state

FIXTURE = Path(__file__).with_name("written_before") / "micro_batch_of_an_eighth"
LAST, MIDDLE = "step-00000005", "step-00000003"


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A copy, since a continued run writes into its folder."""
    return Path(shutil.copytree(FIXTURE, tmp_path / "old"))


def manifest(checkpoint: Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((checkpoint / "manifest.json").read_bytes().partition(b"\n")[2])
    return told


def losses(run: Path) -> dict[int, float]:
    lines = map(json.loads, (run / "metrics" / "rank-00000.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if line["event"] == "step"}


def test_the_state_is_as_old_as_it_should_be() -> None:
    """Else the tests below would show nothing."""
    tree = manifest(FIXTURE / "run" / "checkpoints" / MIDDLE)["tree"]
    assert tree["schedule"].keys() == {"lr", "num_steps"}
    assert tree["config"]["train"]["micro_batch"] == 0


@pytest.mark.parametrize("job", ["job.toml", "run/job.toml"])
def test_job_files_are_read(old: Path, job: str) -> None:
    said = call("config", old / job)
    assert said.code == 0, said.err
    assert "global_batch = 16" in said.out
    assert (
        load_job(old / job).value == load_job(None, extra=json.loads((old / "run" / "config.json").read_text())).value
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["status"], "finished"),
        (["report"], "report.md"),
        (["ckpt", "ls"], LAST),
        (["ckpt", "verify"], "2 checkpoints, 96 chunks: all sound"),
    ],
    ids=" ".join,
)
def test_a_run_folder_is_read(old: Path, words: list[str], said: str) -> None:
    told = call(*words, old / "run")
    assert told.code == 0, told.err
    assert said in told.out


def test_a_report_tells_what_the_event_files_hold(old: Path) -> None:
    assert call("report", old / "run").code == 0
    text = (old / "run" / "report.md").read_text()
    first, last = losses(FIXTURE / "run")[1], losses(FIXTURE / "run")[5]
    assert f"{first:.4f}" in text
    assert f"{last:.4f}" in text


@pytest.mark.world
def test_a_run_is_continued_exactly(old: Path) -> None:
    """From its middle, by a command of today: the samples, micro-batches, losses and last state are those of then."""
    resume = f"checkpoint.resume={old / 'run' / 'checkpoints' / MIDDLE}"
    done = closeranks("train", "job.toml", "-n", 2, resume, "run.folder=again", cwd=old)
    assert done.code == 0, done.err
    assert "micro-batches of 2" in done.out
    before, after = read_samples(FIXTURE / "run"), read_samples(old / "again")
    assert after.steps == {step: before.steps[step] for step in (4, 5)}
    then, now = losses(FIXTURE / "run"), losses(old / "again")
    assert list(now) == [4, 5]
    expected = read_state(FIXTURE / "run" / "checkpoints" / LAST)
    found = read_state(next((old / "again" / "checkpoints").glob(f"{LAST}*")))
    if json.loads((FIXTURE / "environment.json").read_text()) == environment():
        assert now == {step: then[step] for step in now}
        assert difference(expected, found) == ""
    else:
        assert list(now.values()) == pytest.approx([then[step] for step in now], rel=1e-5)
        assert_close(expected, found)


def assert_close(expected: State, found: State) -> None:
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        left, right = (np.frombuffer(one.data, one.dtype) for one in (tensor, found[name]))
        np.testing.assert_allclose(right, left, rtol=1e-4, atol=1e-6, err_msg=name)


def go_on(folder: str) -> int:
    tables = {"train": {"epochs": 2.0}, "checkpoint": {"resume": str(Path(folder) / "run")}}
    job = load_job(Path(folder) / "job.toml", extra=tables).value
    session = Session.from_job(job, Path(folder) / "again", [])
    return run_session(session).steps


@pytest.mark.world
def test_a_run_that_had_ended_goes_on_at_the_sample_where_it_ended(old: Path) -> None:
    """An epoch ended with a step of 8 samples, which the state of then does not say; nor its micro-batch."""
    assert run_world(go_on, 2, str(old)) == [10, 10]
    steps = read_samples(old / "again").steps
    assert list(steps) == [6, 7, 8, 9, 10]
    assert [sum(len(taken.samples) for taken in steps[step]) for step in steps] == [16, 16, 16, 16, 8]
    assert {len(taken.samples) for each in steps.values() for taken in each} == {2}
    taken = Counter(sample for each in steps.values() for one in each for sample in one.samples)
    assert taken == dict.fromkeys(range(72), 1)
