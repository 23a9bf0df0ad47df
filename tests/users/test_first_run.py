"""What a new user does with a first job file, on the command line: train into a pipe, look at the result, take it away.

One run serves most of these tasks, as it would a user: nobody trains anew to read a report.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.cli.calling import Said, call
from tests.cli.commands import FAST, ROOT, TINY, Done, closeranks

pytestmark = pytest.mark.world
STEPS = 12
SMALL = [setting for setting in FAST if not setting.startswith(("train.steps", "telemetry"))]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the user's run lies, in ``runs/tiny``."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def piped(home: Path) -> subprocess.CompletedProcess[str]:
    """``closeranks train ... | head -2``: its reader leaves while it trains. The status is the run's."""
    train = [sys.executable, "-m", "closeranks", "train", TINY, "-n", "2", f"train.steps={STEPS}", *SMALL]
    line = f"{shlex.join(train)} telemetry.log_every=1 | head -2; exit ${{PIPESTATUS[0]}}"
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(["bash", "-c", line], cwd=home, env=env, capture_output=True, text=True, timeout=300)


@pytest.fixture
def run(home: Path, piped: subprocess.CompletedProcess[str]) -> Path:
    assert piped.returncode == 0, piped.stderr
    return home / "runs" / "tiny"


def in_order(done: Done | Said) -> str:
    assert done.code == 0, done.err
    return done.out


def test_output_into_a_pipe(run: Path, home: Path, piped: subprocess.CompletedProcess[str]) -> None:
    """docs/runs.md: how a run can end. Who reads along is no part of the run."""
    assert len(piped.stdout.splitlines()) == 2
    assert "Traceback" not in piped.stderr
    assert f"step {STEPS} of {STEPS}" in in_order(call("status", run, cwd=home))
    assert "certified, latest" in in_order(call("ckpt", "ls", run, cwd=home))


def test_the_report_and_the_curve(run: Path) -> None:
    """docs/runs.md: the run folder. One page says what ran, what it reached and how to go on."""
    page = (run / "report.md").read_text()
    assert "curve.png" in page
    assert re.search(r"closeranks train .*checkpoint\.resume=", page), page
    assert (run / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_sample_from_the_model(run: Path, home: Path) -> None:
    """README: closeranks sample runs/tiny "import "."""
    assert in_order(closeranks("sample", run, "import ", "--tokens", 8, cwd=home)).startswith("import ")


def test_export_to_safetensors(run: Path, home: Path) -> None:
    """docs/checkpoints-hf.md: weights for elsewhere, in a file that any tool opens."""
    in_order(call("ckpt", "convert", run, home / "tiny.safetensors", "--to", "safetensors", cwd=home))
    weights = load_file(home / "tiny.safetensors")
    assert weights["model.embed_tokens.weight"].shape == (256, 128)


def test_a_typo_in_a_key(tmp_path: Path) -> None:
    """docs/config.md: errors. One sentence with the place and the fix, status 2, and nothing is written."""
    (tmp_path / "job.toml").write_text('[model]\nname = "llama"\n[data]\nname = "text"\n[train]\nstepz = 4\n')
    done = call("train", "job.toml", "-n", 2, cwd=tmp_path)
    assert done.code == 2
    assert "train.stepz [job.toml:6]: no such key" in done.err
    assert "Did you mean 'steps'?" in done.err
    assert "Traceback" not in done.err
    assert [path.name for path in tmp_path.iterdir()] == ["job.toml"]


def test_choose_a_layout_and_train_with_it(tmp_path: Path) -> None:
    """docs/layouts.md: choosing one. What ``layout ls`` lists first can be trained with as it stands."""
    listed = in_order(call("layout", "ls", TINY, "-n", 2, "model.num_layers=2", cwd=tmp_path))
    chosen = next(match[0] for line in listed.splitlines() if (match := re.search(r"data=2 zero=\d", line)))
    changes = [*FAST, f"layout={chosen}", "run.folder=run"]
    assert chosen in in_order(closeranks("train", TINY, "-n", 2, *changes, cwd=tmp_path))


def test_go_on_with_another_number_of_workers(run: Path, home: Path) -> None:
    """docs/runs.md: resuming. The same command with a greater length and more workers."""
    more = [*SMALL, "train.steps=16", "checkpoint.resume=runs/tiny", "telemetry.report=false"]
    told = in_order(closeranks("train", TINY, "-n", 3, *more, cwd=home))
    assert "on 3 workers" in told
    assert f"resumed at step {STEPS}" in told
    assert "finished at step 16" in told


def test_change_the_learning_rate_when_going_on(run: Path, home: Path) -> None:
    """docs/runs.md: resuming. A learning rate may change; the seed may not, and that is said."""
    more = [*SMALL, "train.steps=14", f"checkpoint.resume=runs/tiny/checkpoints/step-{STEPS:08d}", "run.folder=other"]
    told = in_order(closeranks("train", TINY, "-n", 2, *more, "optim.lr=1e-4", "telemetry.report=false", cwd=home))
    assert "finished at step 14" in told
    assert "lr = 0.0001" in (home / "other" / "job.toml").read_text()
    refused = closeranks("train", TINY, "-n", 2, *more, "run.seed=8", cwd=home)
    assert refused.code == 2
    assert "seed" in refused.err


def test_it_is_all_still_there_when_the_project_is_elsewhere(run: Path) -> None:
    """docs/checkpoints.md: every byte that is stored can be proven, from any working folder."""
    in_order(call("ckpt", "verify", run, cwd=ROOT))
