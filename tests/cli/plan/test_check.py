"""``closeranks plan check`` on a real run, and how it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from closeranks.cli.plan import check
from closeranks.facts.calibration import Calibration, MemoryPassTime, calibration_text
from closeranks.run.job.job import load_job
from tests.cli.calling import call
from tests.cli.commands import ROOT

FEW = ("train.steps=6", "train.eval_every=0", "train.eval_samples=3", "checkpoint.save=false", "telemetry.report=false")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two workers that share the data."""
    folder = tmp_path_factory.mktemp("check") / "run"
    done = call("train", ROOT / "examples" / "tiny.toml", "-n", 2, *FEW, f"run.folder={folder}")
    assert done.code == 0, done.err
    return folder


@pytest.mark.world
def test_parts_state_and_bytes_of_a_run(run: Path) -> None:
    done = call("plan", "check", run)
    assert done.code == 0, done.err
    for word in ("predicted", "measured", "forward and backward", "data axis", "memory: optimizer", "sent in a step"):
        assert word in done.out, word
    found = json.loads(call("plan", "check", run, "--json").out)
    parts = {part["name"]: part for part in found["parts_s"]}
    assert sum(part["measured"] for part in parts.values()) == pytest.approx(found["step_s"]["measured"])
    assert parts["data axis"]["predicted"] > 0
    sent = {row["name"]: row for row in found["sent_bytes"]}
    assert sent["data axis"]["predicted"] == sent["data axis"]["measured"], "gradients are counted exactly"
    for row in found["memory_bytes"]:
        assert row["error"] == pytest.approx(0, abs=0.02), row["name"]
    assert not found["is_calibrated"]


@pytest.mark.world
def test_a_calibration_changes_what_is_predicted(run: Path, tmp_path: Path) -> None:
    path = tmp_path / "slow.json"
    path.write_text(calibration_text(Calibration(memory_passes=(MemoryPassTime(1 << 10, 1.0),))))
    found = json.loads(call("plan", "check", run, "--calibration", path, "--json").out)
    assert found["is_calibrated"]
    assert found["step_s"]["predicted"] > 100
    assert "although it rests on a calibration" in found["says"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ((), ""),
        (
            ("sync.local.every=8",),
            "Replicas exchange once in 8 steps (Local SGD); the plan sums gradients in every step.",
        ),
        (("sync.compress.name=powersgd",), "What is sent is compressed (powersgd)"),
    ],
)
def test_what_no_plan_contains_is_said(changes: tuple[str, ...], said: str) -> None:
    notes = check._notes(load_job(ROOT / "examples" / "tiny.toml", changes).value)
    assert len(notes) == len(changes)
    assert "".join(notes).startswith(said)


def test_why_a_run_has_nothing_to_compare(tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    text = (ROOT / "examples" / "tiny.toml").read_text()
    job.write_text(f"{text}\n[telemetry]\nphases = false\n")
    assert "ended before its first step" in check._without_steps(tmp_path, job, has_started=False)[0]
    assert "telemetry.phases off" in check._without_steps(tmp_path, job, has_started=True)[0]
    job.write_text(text)
    assert "and the last do not count" in check._without_steps(tmp_path, job, has_started=True)[0]


@pytest.mark.world
def test_a_cluster_of_another_size_is_refused(run: Path) -> None:
    done = call("plan", "check", run, "--cluster", "64xh100")
    assert done.code == 2
    assert "the cluster has 64 devices, and the run had 2 workers" in done.err


def test_what_is_no_run_is_one_sentence(tmp_path: Path) -> None:
    done = call("plan", "check", tmp_path)
    assert done.code == 2
    assert "is not a run folder" in done.err


@pytest.mark.world
def test_a_calibration_of_another_machine_is_refused(run: Path, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(calibration_text(Calibration(device="Another CPU")))
    done = call("plan", "check", run, "--calibration", path)
    assert done.code == 2
    assert "was measured on 'Another CPU', and the run trained on" in done.err


def test_a_calibration_of_a_cpu_is_no_plan_for_gpus(tmp_path: Path) -> None:
    path = tmp_path / "cpu.json"
    path.write_text(calibration_text(Calibration(device="Some CPU")))
    done = call("plan", ROOT / "examples" / "tiny.toml", "--cluster", "8xh100", "--calibration", path)
    assert done.code == 2
    assert "it was measured on another device (Some CPU) than H100" in done.err


@pytest.mark.world
def test_a_run_without_metrics_and_one_without_its_job(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "job.toml").write_text((run / "job.toml").read_text())
    done = call("plan", "check", folder)
    assert done.code == 2
    assert "has no measured step to compare" in done.err
    shutil.copytree(run, tmp_path / "whole")
    (tmp_path / "whole" / "job.toml").unlink()
    done = call("plan", "check", tmp_path / "whole")
    assert done.code == 2
    assert "job.toml" in done.err
