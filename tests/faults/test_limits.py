"""Where surviving ends, and where time itself misbehaves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from closeranks.core.events import RankLost, RanksClosed
from tests.faults.cases import FAKETIME, false_clock, jumps
from tests.faults.conftest import Calm
from tests.faults.harness import Machine, assert_clean, assert_same, assert_struck, bits, go
from tests.faults.misdeeds import AT_STEP

pytestmark = [pytest.mark.world, pytest.mark.timeout(300)]


def test_a_fault_that_is_in_the_code_or_the_data_is_named_and_not_retried_for_ever(tmp_path: Path) -> None:
    (tmp_path / "orders").mkdir()
    (tmp_path / "orders" / "always-2").touch()
    ran = go(tmp_path, "ddp", "elastic.max_repeats=3")
    assert ran.code == 1
    assert_clean(ran)
    assert [(lost.kind, lost.step, lost.rank) for lost in ran.lost] == [("exception", AT_STEP, 2)] * 3
    assert f"step {AT_STEP} (" in ran.err
    assert "failed 3 times in the same way" in ran.err
    assert "This is deterministic" in ran.err
    assert "sample" in ran.err.splitlines()[0]
    assert "these samples are too much for it" in ran.err
    assert "Traceback" not in ran.err


def test_the_budget_ends(tmp_path: Path) -> None:
    faults = "kill(rank=0, step=3), kill(rank=1, step=6), kill(rank=2, step=9), kill(rank=3, step=12)"
    ran = go(tmp_path, "pipeline", "elastic.max_faults=2", faults=faults)
    assert ran.code == 1
    assert_clean(ran)
    assert len(ran.lost) == 3
    assert len(ran.closed) == 2
    assert "elastic.max_faults = 2" in ran.err
    assert "3 faults within" in ran.err


def test_without_elasticity_the_first_fault_ends_it(tmp_path: Path) -> None:
    ran = go(tmp_path, "zero3", "elastic.enabled=false", faults="kill(rank=1, step=6)")
    assert ran.code == 1
    assert_clean(ran)
    assert ran.lost == []
    assert "rank 1 of 3 failed at step" in ran.err
    assert "SIGKILL" in ran.err


@pytest.mark.skipif(not FAKETIME, reason="faketime is not installed")
def test_the_wall_clock_may_jump(tmp_path: Path, calm: Calm) -> None:
    """A year ahead, then two years back, with a fault in between."""
    env, agent_faults = false_clock(tmp_path), jumps(tmp_path)
    ran = go(tmp_path, "tensor", faults="kill(rank=1, step=8)", agent_faults=agent_faults, env=env)
    assert_same(calm("tensor"), ran)
    assert_struck(ran, "killed")
    times = [line.at for line in ran.course.events if isinstance(line.event, RankLost | RanksClosed)]
    assert min(times) > calm("tensor").folder.stat().st_mtime + 300 * 86400  # it did jump


# --- a control: the comparison can fail


def test_who_starts_again_from_weights_alone_learns_something_else(tmp_path: Path, calm: Calm) -> None:
    half, rest = tmp_path / "half", tmp_path / "rest"
    whole = go(half, "ddp", "train.steps=8")
    assert whole.code == 0, whole.said
    assert bits(whole) == {step: loss for step, loss in bits(calm("ddp")).items() if step <= 8}
    again = go(rest, "ddp", "train.steps=8", f"checkpoint.weights={whole.run}")
    assert again.code == 0, again.said
    went_on = {step - 8: loss for step, loss in bits(calm("ddp")).items() if step > 8}
    assert all(loss != went_on[step] for step, loss in bits(again).items())


def test_what_is_left_behind_is_found(tmp_path: Path) -> None:
    (tmp_path / "shm").mkdir()
    machine = Machine()
    assert machine.found(tmp_path) == ()
    script = "import socket; s = socket.create_server(('127.0.0.1', 0)); print('here', flush=True); input()"
    command = [sys.executable, "-c", script]
    env = {**os.environ, machine.mark: "1"}
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        machine.look()
        (tmp_path / "shm" / "left").touch()
        found = machine.found(tmp_path)
        process.kill()
    assert [line.split()[0] for line in found] == ["process:", "listening", "/dev/shm/left"]
    assert machine.found(tmp_path) == ("/dev/shm/left",)
