"""What a new user does to a run that takes long: interrupts it, leaves the terminal, starts a second one beside it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.commands import FAST, TINY, closeranks, started, wait_for_line

pytestmark = pytest.mark.world
QUICK = [setting for setting in FAST if not setting.startswith("train.steps")]
LONG = ["train", TINY, "-n", "2", *QUICK, "run.folder=run", "telemetry.log_every=1"]
SCRIPT = """
import torch
from torch import nn
import closeranks

def loss(model, batch):
    return model(batch["x"]).square().mean()

result = closeranks.train(nn.Linear(4, 1), torch.randn(64, 4), loss, train={{"steps": 4, "global_batch": 8}},
                          run={{"name": "{name}"}}, telemetry={{"report": False}})
if result.folder:
    print("it lies in", result.folder)
"""


def test_ctrl_c_and_go_on(tmp_path: Path) -> None:
    """docs/runs.md: how a run can end. Ctrl-C saves, exits with 130, and says how to continue."""
    with started(*LONG, "train.steps=100000", "agent.interrupt_s=120", cwd=tmp_path) as (process, _):
        wait_for_line(process, "step     5/")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=300)
    assert process.returncode == 130, err
    assert "checkpoint.resume=" in out + err
    step = int(re.findall(r"saved step (\d+)", out)[-1])
    done = closeranks(*LONG, f"train.steps={step + 2}", "checkpoint.resume=auto", cwd=tmp_path)
    assert done.code == 0, done.err
    assert f"resumed at step {step}" in done.out
    assert f"finished at step {step + 2}" in done.out


def test_nohup_and_a_lost_connection(tmp_path: Path) -> None:
    """docs/launching.md: long runs over ssh. Under nohup a run goes on when its terminal is gone."""
    line = ["nohup", sys.executable, "-m", "closeranks", *LONG, "train.steps=40"]
    with (tmp_path / "train.log").open("w") as log:
        process = subprocess.Popen(
            line, cwd=tmp_path, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    while "step     2/40" not in (tmp_path / "train.log").read_text():
        assert process.poll() is None, (tmp_path / "train.log").read_text()
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGHUP)
    assert process.wait(300) == 0, (tmp_path / "train.log").read_text()
    assert "finished at step 40" in (tmp_path / "train.log").read_text()


def test_two_scripts_in_one_folder(tmp_path: Path) -> None:
    """docs/python.md: each script writes to its own folder in runs/; the same one again to the next free number."""
    for name in ("first", "second"):
        (tmp_path / f"{name}.py").write_text(SCRIPT.format(name=name))
    pair = [
        subprocess.Popen(
            [sys.executable, "-m", "closeranks", "run", "-n", "1", f"{name}.py"],
            cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE, text=True,
        )
        for name in ("first", "second")
    ]  # fmt: skip
    for process in pair:
        _, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["first", "second"]
    for name in ("first", "second"):
        assert (tmp_path / "runs" / name / "checkpoints" / "latest").exists()
        assert "it lies in" in (tmp_path / "runs" / name / "logs" / "rank-00000.log").read_text()


def test_under_torchrun(tmp_path: Path) -> None:
    """docs/launching.md: the same job file, started by torchrun."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    line = [*torchrun, "-m", "closeranks", "train", TINY, *QUICK, "train.steps=3", "run.folder=run"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "on 2 workers" in done.stdout
    assert (tmp_path / "run" / "checkpoints" / "latest").exists()
