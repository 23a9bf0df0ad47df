"""Bit-identical: two runs of one job, and a resumed run against the one that never stopped."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from closeranks.testing import run_world
from tests.run.saved import spoil_optimizer
from tests.run.trajectories import Trajectory, trajectory

pytestmark = pytest.mark.world

CHANGES: dict[str, Any] = {
    "model": {"dropout": 0.2},
    "run": {"deterministic": True},
    "train": {"steps": 6, "global_batch": 12, "micro_batch": 2},
    "sync": {"bucket_mib": 0.02, "first_bucket_mib": 0.005},  # several buckets, so that their order matters
}


def assert_identical(left: Trajectory, right: Trajectory) -> None:
    assert left.losses == right.losses
    assert left.norms == right.norms
    for name, tensor in left.weights.items():
        assert torch.equal(tensor, right.weights[name]), name


def test_two_runs_are_bit_identical_and_another_seed_is_not(tmp_path: Path) -> None:
    first, second = (run_world(trajectory, 3, tmp_path / name, CHANGES)[0] for name in ("first", "second"))
    assert_identical(first, second)
    control = run_world(trajectory, 3, tmp_path / "control", {**CHANGES, "run": {"deterministic": True, "seed": 1}})[0]
    assert control.losses != first.losses


@pytest.mark.parametrize("precision", ["float32", pytest.param("fp16", marks=pytest.mark.slow)])
def test_resumed_equals_uninterrupted_bit_for_bit(tmp_path: Path, precision: str) -> None:
    """Three data ranks, dropout and accumulation on; stopped after three steps and resumed by fresh processes."""
    changes = {**CHANGES, "train": {**CHANGES["train"], "precision": precision}}
    whole = run_world(trajectory, 3, tmp_path / "whole", changes)[0]
    run_world(stopped_after_three, 3, tmp_path / "half", changes)
    resumed_from = {**changes, "checkpoint": {"resume": str(tmp_path / "half")}}
    rest = run_world(trajectory, 3, tmp_path / "rest", resumed_from)[0]
    assert rest.losses == whole.losses[3:]
    assert rest.scales == whole.scales[3:]
    for name, tensor in whole.weights.items():
        assert torch.equal(tensor, rest.weights[name]), name
    control = shutil.copytree(tmp_path / "half", tmp_path / "control")
    spoil_optimizer(control)
    other = run_world(trajectory, 3, tmp_path / "other", {**changes, "checkpoint": {"resume": str(control)}})[0]
    assert other.losses[1:] != whole.losses[4:], "without its optimizer state a run must diverge"


def stopped_after_three(folder: Path, changes: dict[str, Any]) -> None:
    from closeranks import Hook, Session
    from closeranks.core.events import StepDone

    class Stop(Hook):
        def on_step(self, session: Session, step: StepDone) -> None:
            if step.step == 2 and session.world.rank == 1:  # one rank asks, all stop at the end of the next step
                session.stop("that is enough")

    result = trajectory(folder, changes, [Stop()])
    assert len(result.losses) == 3
