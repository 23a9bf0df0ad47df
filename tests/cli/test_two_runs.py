"""Two real runs that want one folder: the second is refused, and a killed one is no obstacle."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.commands import FAST, TINY, closeranks, started, wait_for_line
from tests.launchers.jobs import environment
from tests.run.job.test_ownership import contents

pytestmark = [pytest.mark.world, pytest.mark.timeout(400)]
LONG = [*FAST, "train.steps=100000", "telemetry.log_every=1", "checkpoint.every=0"]
SCRIPT = """
import sys
import torch
import closeranks
data = torch.utils.data.TensorDataset(torch.randn(8, 4))
closeranks.train(lambda: torch.nn.Linear(4, 1), data, lambda model, batch: model(batch[0]).mean(),
    run={"folder": sys.argv[1]}, train={"steps": 1, "global_batch": 8}, checkpoint={"resume": "auto"})
"""


def recorded(folder: Path) -> list[str]:
    """All that a second run might have touched; what the live one still appends to is left out."""
    growing = ("metrics/", "logs/", "status.json")
    return sorted(name for name in contents(folder) if not name.startswith(growing))


def test_a_second_run_is_refused_and_a_killed_one_frees_its_folder_at_once(tmp_path: Path) -> None:
    with started("train", TINY, "-n", 1, *LONG, f"run.folder={tmp_path}/run", cwd=tmp_path) as (first, _):
        wait_for_line(first, "step     1/")
        before, job = recorded(tmp_path / "run"), (tmp_path / "run" / "job.toml").read_text()
        for resume in ("auto", f"{tmp_path}/run"):
            again = [f"run.folder={tmp_path}/run", f"checkpoint.resume={resume}", "optim.lr=0.5"]
            done = closeranks("train", TINY, *FAST, *again, cwd=tmp_path)
            assert done.code == 2
            assert f"in use by a run, process {first.pid} on " in done.err
            assert done.err.count("closeranks: ") == 1
        place = [f"run.folder={tmp_path}/other", f"checkpoint.folder={tmp_path}/run/checkpoints"]
        assert closeranks("train", TINY, *FAST, *place, cwd=tmp_path).code == 2
        assert os.listdir(tmp_path) == ["run"]
        assert closeranks("status", tmp_path / "run", cwd=tmp_path).code == 0
        assert recorded(tmp_path / "run") == before
        assert (tmp_path / "run" / "job.toml").read_text() == job
        first.kill()
        first.wait()
        done = closeranks("train", TINY, *FAST, again[0], "checkpoint.resume=auto", cwd=tmp_path)
        assert done.code == 0, done.err


@pytest.mark.slow
def test_scripts_and_torchrun_are_refused_too(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    with started("train", TINY, "-n", 1, *LONG, f"run.folder={tmp_path}/run", cwd=tmp_path) as (first, _):
        wait_for_line(first, "step     1/")
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        script = [str(tmp_path / "script.py"), f"{tmp_path}/run"]
        commands = [
            [sys.executable, *script],
            [sys.executable, "-m", "closeranks", "run", *script],
            [
                *torchrun,
                "-m",
                "closeranks",
                "train",
                TINY,
                *FAST,
                f"run.folder={tmp_path}/run",
                "checkpoint.resume=auto",
            ],
        ]
        for command in commands:
            done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=300)
            assert done.returncode != 0
            assert done.stderr.count(f"in use by a run, process {first.pid} on ") == 1, done.stderr
            assert "another exception occurred" not in done.stderr
