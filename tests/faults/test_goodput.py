"""The account of a run that is killed three times is that of a stopwatch."""

from __future__ import annotations

import re
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest
import torch

from closeranks.telemetry.device import device_name
from closeranks.telemetry.goodput.loss_target import load_target
from closeranks.telemetry.goodput.run_account import load_account
from closeranks.telemetry.goodput.run_cost import find_price
from closeranks.telemetry.goodput.time_account import (
    DETECTION,
    EVALUATION,
    IN_PHASES,
    RECOVERY,
    REDONE,
    SAVE,
    STRAGGLER,
    UNACCOUNTED,
    USEFUL,
    TimeAccount,
)
from closeranks.telemetry.live.status import read_status
from closeranks.telemetry.run_log.run_history import load_history
from tests.faults.harness import SHAPES, assert_struck, go
from tests.faults.stopwatch import time_that_counts

pytestmark = [pytest.mark.world, pytest.mark.timeout(300)]

HOOKS = 'run.hooks=["tests.faults.misdeeds:Misdeeds", "tests.faults.stopwatch:Stopwatch"]'
PER_HOUR = 3.6


@dataclass
class WorkerTime:
    """Wall time from outside: from the start of the agent to the end of its last child."""

    began_at: float = 0.0
    ended_at: float = 0.0

    @property
    def seconds(self) -> float:
        return self.ended_at - self.began_at

    def measure(self, process: subprocess.Popen[str], run: Path) -> None:
        self.began_at, agent = time.time(), psutil.Process(process.pid)
        while process.poll() is None:
            with suppress(psutil.Error):
                if agent.children():
                    self.ended_at = time.time()
            time.sleep(0.01)


def counted_s(account: TimeAccount) -> float:
    """All time in steps that count, whatever it was spent on. The job saves and evaluates after its last step alone."""
    after = (SAVE, EVALUATION)
    return sum(account.rows[name] for name in (USEFUL, STRAGGLER, *IN_PHASES) if name not in after)


def test_three_kills_against_a_stopwatch(tmp_path: Path) -> None:
    prices = tmp_path / "prices.toml"
    name = device_name(torch.device("cpu"))
    prices.write_text(f'[[price]]\ndevice = "{name}"\nper_hour = {PER_HOUR}\nsource = "a test"\n')
    settings = ["train.steps=60", "telemetry.log_every=1", f"telemetry.prices={prices}", HOOKS]
    faults = "kill(rank=1, step=15), kill(rank=0, step=30, at=0.5), kill(rank=3, step=45)"
    outside = WorkerTime()
    ran = go(tmp_path, "ddp", *settings, faults=faults, meanwhile=outside.measure)
    wall_s = outside.seconds
    assert ran.code == 0, ran.said
    assert_struck(ran, "killed", "killed", "killed")
    num_workers = SHAPES["ddp"].num_workers
    account = load_account(ran.run)

    assert account.wall_s == pytest.approx(wall_s, rel=0.01)
    assert account.worker_s == pytest.approx(num_workers * wall_s, rel=0.01)
    assert account.device_hours == pytest.approx(num_workers * wall_s / 3600, rel=0.01)
    price, note = find_price(ran.run, name)
    assert price is not None
    assert note == ""
    assert price.cost(account.device_hours) == pytest.approx(PER_HOUR * num_workers * wall_s / 3600, rel=0.01)

    assert sum(account.rows.values()) == pytest.approx(account.worker_s)
    assert abs(account.rows[UNACCOUNTED]) < 0.005 * account.worker_s
    by_stopwatch = time_that_counts(ran.run) / (num_workers * wall_s)
    assert counted_s(account) / account.worker_s == pytest.approx(by_stopwatch, rel=0.01)

    assert (account.num_steps, account.num_faults, account.num_launches) == (60, 3, 1)
    # Recovery ends when the first step begins: within what the agent reports as that step.
    longest_s = num_workers * sum(closed.seconds for closed in ran.closed)
    shortest_s = longest_s - num_workers * sum(closed.parts["step"] for closed in ran.closed)
    assert 0.98 * shortest_s < account.rows[RECOVERY] < 1.02 * longest_s
    assert account.rows[REDONE] > 0
    assert account.rows[DETECTION] == pytest.approx(num_workers * sum(lost.detected_s for lost in ran.lost), abs=0.1)
    shown = float(re.findall(r"cost \$(\d+\.\d+)", ran.out)[-1])
    assert 0.5 * price.cost(account.device_hours) < shown < 1.05 * price.cost(account.device_hours) + 0.01

    status = read_status(ran.run)
    assert status is not None
    live = status.account
    assert live.worker_s == pytest.approx(account.worker_s, rel=0.005)
    assert live.rows[USEFUL] == pytest.approx(account.rows[USEFUL] + account.rows[STRAGGLER], rel=0.05)
    assert replace(live, rows={}, worker_s=0, wall_s=0, num_ranks=0, num_read=0) == replace(
        account, rows={}, worker_s=0, wall_s=0, num_ranks=0, num_read=0
    )


def test_a_run_that_is_continued_is_one_account(tmp_path: Path) -> None:
    """Both commands are paid for, and the time between them is not."""
    first, second = WorkerTime(), WorkerTime()
    assert go(tmp_path, "zero3", meanwhile=first.measure).code == 0
    time.sleep(1.0)  # what must not be counted
    ran = go(tmp_path, "zero3", "train.steps=24", "checkpoint.resume=run", meanwhile=second.measure)
    assert ran.code == 0, ran.said
    account, status = load_account(ran.run), read_status(ran.run)
    assert account.wall_s == pytest.approx(first.seconds + second.seconds, rel=0.01)
    assert (account.num_steps, account.num_launches, account.num_redone) == (24, 2, 0)
    assert abs(account.rows[UNACCOUNTED]) < 0.005 * account.worker_s
    assert status is not None
    assert status.account.worker_s == pytest.approx(account.worker_s, rel=0.005)
    assert (status.account.num_steps, status.account.num_launches) == (24, 2)


def test_a_target_loss_is_found_over_a_kill_and_a_second_command(tmp_path: Path) -> None:
    """The mean of 20 steps that reaches it is of steps 3 to 22: of two commands, and of steps done twice."""
    (tmp_path / "plain").mkdir()
    (tmp_path / "struck").mkdir()
    plain = go(tmp_path / "plain", "ddp", "train.steps=24")
    losses = [done.loss for done in load_history(plain.run).steps]
    target = f"telemetry.target_loss={sum(losses[2:22]) / 20 + 1e-9!r}"
    first = go(tmp_path / "struck", "ddp", target, faults="kill(rank=1, step=8)")
    assert_struck(first, "killed")
    assert re.search(r"target loss \S+ in training: not reached \(lowest so far", first.out), first.said
    ran = go(tmp_path / "struck", "ddp", "train.steps=24", "checkpoint.resume=run", target)
    assert ran.code == 0, ran.said
    assert re.search(r"target loss \S+ in training: reached at step 22, after ", ran.out), ran.said
    status, found, account = read_status(ran.run), load_target(ran.run), load_account(ran.run)
    assert status is not None
    assert status.target is not None
    assert found is not None
    assert found.step == status.target.step == 22
    assert found.loss == status.target.loss == pytest.approx(sum(losses[2:22]) / 20, rel=1e-12)
    assert found.num_samples == status.target.num_samples == 22 * 16
    assert found.worker_s == pytest.approx(SHAPES["ddp"].num_workers * found.wall_s, rel=0.01)
    assert status.target.wall_s == pytest.approx(found.wall_s, rel=0.02)
    assert 0.5 * account.wall_s < found.wall_s < account.wall_s
