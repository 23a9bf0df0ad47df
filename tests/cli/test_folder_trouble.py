"""A run whose folder is full, removed or read-only while it trains, and a worker that is lost in the middle of that:
training goes on to the same bits, records come back, and the state is saved once there is a place for it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from closeranks.core.events import RanksClosed, StepDone
from closeranks.telemetry.run_log.recorder import read_events
from closeranks.telemetry.run_log.sample_log import read_samples
from tests.checkpoint.test_write_faults import tmpfs
from tests.cli.fault_hooks import TROUBLE, Troubled
from tests.cli.fault_jobs import STEPS, Course, course, go, hook

pytestmark = [
    pytest.mark.world,
    pytest.mark.timeout(300),
    pytest.mark.skipif(os.geteuid() != 0, reason="mounting file systems needs root"),
]
SETTINGS = (
    hook("Troubled"),
    "checkpoint.every=0",
    "data.log_samples=true",
    "telemetry.report=true",
    "elastic.snapshot_every=1",
)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Course:
    folder = tmp_path_factory.mktemp("calm")
    done = go(folder, "checkpoint.every=0")
    assert done.code == 0, done.err
    return course(folder / "run")


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    with tmpfs(tmp_path / "disk", "64m") as disk:
        yield disk
        while (
            subprocess.run(["findmnt", "-o", "OPTIONS", "-n", str(disk)], capture_output=True, text=True).stdout.count(
                "\n"
            )
            > 1
        ):
            subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize(
    ("trouble", "words", "first"),
    [
        ("full", "cannot be written (No space left on device)", 1),
        ("removed", "", Troubled.BEGIN + 1),
        ("read-only", "cannot be written (Read-only file system)", 1),
    ],
    ids=["full", "removed", "read-only"],
)
def test_training_goes_on(tmp_path: Path, calm: Course, place: Path, trouble: str, words: str, first: int) -> None:
    run = place / "run"
    done = go(tmp_path, *SETTINGS, f"run.folder={run}", env={TROUBLE: trouble}, timeout_s=200)
    assert done.code == 0, done.out + done.err
    assert done.err == ""
    assert words in done.out
    assert "Traceback" not in done.out
    assert done.out.count("the agent's metrics cannot be written") <= 1, "it is told once"
    assert "report: disk/run/report.md\n" in done.out
    assert course(run).digests == calm.digests
    told = [event for _, event in read_events(run / "metrics" / "rank-00000.jsonl") if isinstance(event, StepDone)]
    recorded = {(event.step, event.loss) for event in told}
    expected = {(step, loss) for step, loss in calm.losses if step >= first}
    # What the full disk refused is in the memory of the process that is killed; the file's last block takes some.
    buffered = set(range(Troubled.BEGIN + 1, Troubled.KILL)) if trouble == "full" else set()
    assert recorded <= expected
    assert {step for step, _ in expected - recorded} <= buffered, "nothing else is lost"
    assert set(range(first, STEPS + 1)) <= set(read_samples(run).steps)
    (closed,) = (event for _, event in read_events(run / "metrics" / "agent.jsonl") if isinstance(event, RanksClosed))
    assert closed.num_redone <= 1


def test_a_disk_that_stays_full_costs_no_step(tmp_path: Path, calm: Course, place: Path) -> None:
    """Nothing was saved before, a worker was lost, and the run comes to its end: its state is where there is room."""
    (tmp_path / "spare").mkdir()
    env = {TROUBLE: "full", "TMPDIR": str(tmp_path / "spare")}
    where = ("run.folder=" + str(place / "run"), "checkpoint.folder=" + str(place / "saved"))
    done = go(tmp_path, hook("FullForEver"), "checkpoint.every=0", *where, env=env, timeout_s=200)
    assert done.code == 2, done.out + done.err
    assert "Traceback" not in done.out + done.err
    assert "the disk is full" in done.err or "no space is left" in done.err
    resumed = done.err.partition("checkpoint.resume=")[2].split(". ")[0].strip().rstrip(".")
    assert f"The state of step {STEPS} is in {resumed}/step-{STEPS:08d} instead" in done.err
    try:
        assert course(place / "run", resumed).digests == calm.digests
    finally:
        subprocess.run(["rm", "-r", resumed], check=True)
