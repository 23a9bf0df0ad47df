from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.launchers.conftest import STEPS
from tests.launchers.jobs import ROOT, SMALL, TINY, TRAIN, assert_complete, environment, said

pytestmark = pytest.mark.world
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def launched(*command: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        list(map(str, command)), cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300
    )


def test_the_documented_script_trains_as_two_workers_of_our_own_do(tmp_path: Path, expected: list[float]) -> None:
    folder = tmp_path / "run"
    script = ROOT / "examples" / "launchers" / "torchrun.sh"
    done = launched(script, TINY, *SMALL, f"train.steps={STEPS}", f"run.folder={folder}")
    assert done.returncode == 0, done.stderr
    assert "on 2 workers" in done.stdout
    assert done.stdout.count("report: ") == 1
    assert_complete(folder, expected)


@pytest.mark.parametrize(
    ("mistake", "sentence"),
    [
        # met before torch is imported
        pytest.param("train.stepz=4", "1 problem in the job", marks=pytest.mark.slow),
        ("checkpoint.resume=/nowhere", "there is no checkpoint at /nowhere"),  # met with the group open
    ],
)
def test_a_mistake_is_told_once(tmp_path: Path, mistake: str, sentence: str) -> None:
    done = launched(*TORCHRUN, *TRAIN, *SMALL, "train.steps=4", f"run.folder={tmp_path}/run", mistake)
    assert done.returncode == 1  # torchrun's own status, whatever the ranks say
    assert [sentence in line for line in said(done.stderr)] == [True]
    assert "exitcode  : 2" in done.stderr
    assert "SIGABRT" not in done.stderr
    assert "site-packages/closeranks" not in done.stderr


def test_a_number_of_workers_that_torchrun_did_not_start_is_refused(tmp_path: Path) -> None:
    done = launched(*TORCHRUN, *TRAIN, "-n", "3", f"run.folder={tmp_path}/run")
    assert len(said(done.stderr)) == 1
    assert "-n: 3 were asked for, but torchrun has started 2 workers. Leave it out." in done.stderr
