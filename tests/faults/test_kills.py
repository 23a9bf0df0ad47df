"""Processes that are killed, whichever and whenever: the run comes out the same, in every bit."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from closeranks.core.events import Restored
from closeranks.core.system.failpoints import FAILPOINTS
from closeranks.telemetry.run_log.recorder import read_events
from tests.faults.agent_faults import KillNewWorker
from tests.faults.cases import AROUND_RECOVERY, IN_COPYING, IN_RECOVERY, deadly, sweep
from tests.faults.conftest import Calm
from tests.faults.harness import assert_clean, assert_same, assert_struck, bits, go, wait_for_step

pytestmark = [pytest.mark.world, pytest.mark.timeout(300)]


def test_one_worker_at_the_first_a_middle_and_the_last_step(tmp_path: Path, calm: Calm) -> None:
    ran = go(tmp_path, "ddp", faults="kill(rank=1, step=1), kill(rank=0, step=8, at=0.5), kill(rank=3, step=16)")
    assert_same(calm("ddp"), ran)
    assert_struck(ran, "killed", "killed", "killed")
    assert [lost.rank for lost in ran.lost] == [1, 0, 3]


def test_two_workers_the_zygote_and_one_that_is_asked_to_go(tmp_path: Path, calm: Calm) -> None:
    ran = go(tmp_path, "tensor", faults="term(rank=2, step=2), kill2(rank=0, other=3, step=12), zygote(step=14)")
    assert_same(calm("tensor"), ran)
    assert_struck(ran, "preempted", "killed", "zygote")
    assert [lost.rank for lost in ran.lost][::2] == [2, -1]
    assert ran.closed[0].num_redone == 0  # it left after its step


def test_nothing_outlives_the_agent(tmp_path: Path) -> None:
    def strike(process: subprocess.Popen[str], run: Path) -> None:
        wait_for_step(process, run, 5)
        os.kill(process.pid, signal.SIGKILL)

    ran = go(tmp_path, "zero3", "train.steps=3000", meanwhile=strike)
    assert ran.code == -signal.SIGKILL
    assert ran.ports  # there was something to be left
    assert_clean(ran)


def test_whoever_comes_in_their_place(tmp_path: Path, calm: Calm) -> None:
    """A second fault while the first is being repaired, and a third."""
    ran = go(tmp_path, "zero3", faults="kill(rank=2, step=6)", agent_faults=[KillNewWorker(0, 1), KillNewWorker(1, 2)])
    assert_same(calm("zero3"), ran)
    assert_struck(ran, "killed", "killed", "killed")
    assert [lost.generation for lost in ran.lost] == [0, 1, 2]
    assert len(ran.closed) == 1


def test_points_are_all_swept() -> None:
    import closeranks.agent.workers.forked_worker
    import closeranks.elastic.snapshot_writer
    import closeranks.run.state.restore  # noqa: F401

    here = {label for label in FAILPOINTS if label.startswith(("restore.", "slot."))}
    # What comes from another host is struck where there are several.
    assert here == {*AROUND_RECOVERY, *IN_RECOVERY, *IN_COPYING, "restore.fetching"}


def test_at_every_point_of_a_recovery(tmp_path: Path, calm: Calm) -> None:
    """An order to die waits there when the next generation passes."""
    orders = sweep(tmp_path, IN_RECOVERY, first=3, every=4, rank=0)
    faults = ", ".join(f"kill(rank={n}, step={4 + 4 * n})" for n in range(len(IN_RECOVERY)))
    ran = go(tmp_path, "pipeline", faults=faults, agent_faults=orders, env=deadly(tmp_path))
    assert_same(calm("pipeline"), ran)
    assert_struck(ran, *["killed"] * (2 * len(IN_RECOVERY)))
    assert os.listdir(tmp_path / "orders") == []


def test_from_the_fork_to_the_first_step_after_a_recovery(tmp_path: Path, calm: Calm) -> None:
    """A second kill as soon as a worker is forked, when the group has formed, and in the step that is done again."""
    orders = sweep(tmp_path, AROUND_RECOVERY, first=3, every=4, rank=0)
    faults = ", ".join(f"kill(rank={n}, step={4 + 4 * n})" for n in range(len(AROUND_RECOVERY)))
    ran = go(tmp_path, "zero3", faults=faults, agent_faults=orders, env=deadly(tmp_path))
    assert_same(calm("zero3"), ran)
    assert_struck(ran, *["killed"] * (2 * len(AROUND_RECOVERY)))
    assert os.listdir(tmp_path / "orders") == []


def test_at_every_point_of_a_copy(tmp_path: Path, calm: Calm) -> None:
    """A copy that is torn at any of its moments is not taken for one."""
    orders = sweep(tmp_path, IN_COPYING, first=2, every=2, rank=1)
    ran = go(tmp_path, "zero3", agent_faults=orders, env=deadly(tmp_path))
    assert_same(calm("zero3"), ran)
    assert_struck(ran, *["killed"] * len(IN_COPYING))
    assert os.listdir(tmp_path / "orders") == []


# --- controls: the comparison can fail


def test_without_what_the_optimizer_remembers_the_run_is_another(tmp_path: Path, calm: Calm) -> None:
    (tmp_path / "orders").mkdir()
    (tmp_path / "orders" / "forget").touch()
    ran = go(tmp_path, "ddp", faults="kill(rank=1, step=9)")
    assert ran.code == 0, ran.said
    assert_struck(ran, "killed")
    ours, theirs = bits(ran), bits(calm("ddp"))
    begun = next(event for _, event in read_events(ran.run / "metrics/rank-00000.jsonl") if isinstance(event, Restored))
    assert [step for step in theirs if ours[step] != theirs[step]][0] <= begun.step + 2  # noqa: RUF015
    assert ours.keys() == theirs.keys()
    with pytest.raises(AssertionError):
        assert_same(calm("ddp"), ran)
