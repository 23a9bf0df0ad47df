"""Every example runs as its first lines say."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.cli.commands import ROOT, closeranks

pytestmark = pytest.mark.world

EXAMPLES = ROOT / "examples"
FEWER = {
    "tiny": ["train.steps=6"],
    "demo": ["train.steps=4"],
    "digits": ["train.epochs=2"],
    "pairs": ["train.steps=40"],
    "recommender": ["train.epochs=0.5", "data.num_samples=65536"],
    "recommender_servers": ["train.epochs=0.5", "data.num_samples=65536"],
}
NUM_RANKS = {"recommender_servers": 4}
"""Two where nothing stands here."""


def losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics" / "rank-00000.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["event"] == "step"]


def tiered(name: str) -> Any:
    """The models of these are trained elsewhere, too."""
    return pytest.param(name, marks=[pytest.mark.slow] * (name not in ("tiny", "demo")))


@pytest.mark.parametrize("name", [tiered(path.stem) for path in sorted(EXAMPLES.glob("*.toml"))])
def test_a_job_trains(tmp_path: Path, name: str) -> None:
    changes = [*FEWER[name], "run.folder=run", "telemetry.report=false"]
    done = closeranks("train", EXAMPLES / f"{name}.toml", "-n", NUM_RANKS.get(name, 2), *changes, cwd=tmp_path)
    assert done.code == 0, done.err
    found = losses(tmp_path / "run")
    assert found[-1] < found[0]
    assert not done.left_behind


def test_the_own_model_trains_from_its_folder(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLES / "own_model", tmp_path / "own")
    done = closeranks("train", "own/job.toml", "-n", 2, "run.folder=run", "telemetry.report=false", cwd=tmp_path)
    assert done.code == 0, done.err
    assert losses(tmp_path / "run")[-1] < 0.3
    assert "eval at step 100" in done.out


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("ten_lines", "after 100 steps"),
        ("own_loop", "loss 0."),
        pytest.param("hooks", "held-out accuracy", marks=pytest.mark.slow),
        pytest.param("bare_loop", "step 30", marks=pytest.mark.slow),
    ],
)
def test_a_script_says_what_it_should(tmp_path: Path, name: str, words: str) -> None:
    done = closeranks("run", "-n", 1 if name == "bare_loop" else 2, EXAMPLES / f"{name}.py", cwd=tmp_path)
    assert done.code == 0, done.err
    assert words in done.out


def test_the_bare_loop_stays_short() -> None:
    assert len((EXAMPLES / "bare_loop.py").read_text().splitlines()) <= 120
