"""A run by epochs is continued with the very command that its report gives."""

from __future__ import annotations

import re
import shlex
import shutil
from collections import Counter
from pathlib import Path

import pytest

from closeranks.checkpoint.load.resharding_reader import open_newest
from closeranks.core.events import RunStarted, StepDone
from closeranks.telemetry.run_log.sample_log import read_samples
from tests.cli.commands import closeranks
from tests.cli.fault_jobs import IMPORTABLE
from tests.cli.own_numbers import JOB
from tests.run.small import of_kind

pytestmark = [pytest.mark.world, pytest.mark.timeout(300)]


def go_on(folder: Path, *more: object) -> None:
    """What the report says, typed as it stands there."""
    page = (folder / "report.md").read_text()
    (command,) = re.findall(r"^closeranks (train .*checkpoint.resume=.*)$", page, re.MULTILINE)
    done = closeranks(*shlex.split(command), *more, cwd=folder.parents[1], env=IMPORTABLE)
    assert done.code == 0, done.err


def start(folder: Path, *words: object) -> Path:
    (folder / "job.toml").write_text(JOB)
    done = closeranks("train", "job.toml", "-n", 2, *words, cwd=folder, env=IMPORTABLE)
    assert done.code == 0, done.err
    return folder / "runs" / "job"


def samples(run: Path) -> Counter[int]:
    log = read_samples(run)
    assert not log.conflicts
    return Counter(sample for step in log.steps for sample in log.samples_of(step))


def test_the_command_of_the_report_goes_on(tmp_path: Path) -> None:
    run = start(tmp_path)
    go_on(run)
    assert [done.items for done in of_kind(run, StepDone)] == [8] * 6 + [6] + [8] * 6 + [6]
    assert set(samples(run).values()) == {4}
    assert len(samples(run)) == 27
    assert "train.epochs=8" in (run / "report.md").read_text()


@pytest.mark.timeout(600)  # four runs
def test_a_continuation_that_is_struck_or_resized_is_the_same_run(tmp_path: Path) -> None:
    """A worker lost in it changes no bit; another number of workers takes the same samples in every step."""
    start(tmp_path)
    runs = {name: tmp_path / name / "runs" / "job" for name in ("whole", "struck", "resized")}
    for run in runs.values():
        shutil.copytree(tmp_path / "runs", run.parents[0])
        shutil.copy(tmp_path / "job.toml", run.parents[1])
    by_steps = ("~train.epochs", "train.steps=12")
    go_on(runs["whole"], *by_steps)
    go_on(runs["struck"], *by_steps, "--faults", "kill(rank=1, step=9)")
    go_on(runs["resized"], *by_steps, "-n", 1)
    states = {name: open_newest(str(run)) for name, run in runs.items()}
    assert of_kind(runs["struck"], RunStarted)[-1].generation == 1
    assert states["struck"].manifest.digests() == states["whole"].manifest.digests()
    for name, run in runs.items():
        assert states[name].tree["progress"] == {"step": 12, "position": 54 + 5 * 8}
        assert read_samples(run).steps == read_samples(runs["whole"]).steps
    losses = [[done.loss for done in of_kind(runs[name], StepDone)] for name in ("whole", "resized")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
