"""Plan, train, check, calibrate and plan again, each by the command that the last one names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from closeranks.lab.calibrate import calibrate, workers
from tests.cli.calling import call
from tests.cli.commands import ROOT

TINY = ROOT / "examples" / "tiny.toml"
FEW = ("train.steps=6", "train.eval_every=0", "train.eval_samples=3", "checkpoint.save=false", "telemetry.report=false")


@pytest.mark.slow
@pytest.mark.world
def test_what_a_run_shows_goes_into_the_next_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_TURN_S", 0.01)
    all_runs = calibrate.calibration_runs
    monkeypatch.setattr(calibrate, "calibration_runs", lambda *how: all_runs(*how)[1:2])
    planned, run, measured = tmp_path / "planned.toml", tmp_path / "run", tmp_path / "mine.json"

    first = call("plan", TINY, "--cluster", "2xcpu", "--out", planned)
    assert first.code == 0, first.err
    trained = call("train", planned, "-n", 2, *FEW, f"run.folder={run}")
    assert trained.code == 0, trained.err
    before = call("plan", "check", run)
    assert before.code == 0, before.err
    assert "The largest difference is" in before.out or "No part differs" in before.out
    calibrated = call("plan", "calibrate", planned, "--device", "cpu", "--seconds", 1, "--out", measured, cwd=tmp_path)
    assert calibrated.code == 0, calibrated.err

    known = json.loads(call("plan", "check", run, "--calibration", measured, "--json").out)
    unknown = json.loads(call("plan", "check", run, "--json").out)
    assert (known["is_calibrated"], unknown["is_calibrated"]) == (True, False)
    assert known["step_s"]["measured"] == unknown["step_s"]["measured"]
    assert known["step_s"]["predicted"] != unknown["step_s"]["predicted"]
    again = call("plan", TINY, "--cluster", "2xcpu", "--calibration", measured)
    assert again.code == 0, again.err
    assert again.out != first.out
