"""The command line, ``closeranks.train`` and a ``Session`` in an own loop give the same losses, to the last bit."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.commands import ROOT, closeranks

pytestmark = pytest.mark.world

HEAD = """
import closeranks
from torch import nn
from net import Net, loss, data
def model(): return Net(width=64)
tables = dict(train={"steps": 100, "global_batch": 32}, optim={"lr": 3e-3})
"""
TRAIN = HEAD + "closeranks.train(model, data(), loss, run={'folder': 'train'}, **tables)\n"
SESSION = (
    HEAD
    + """
session = closeranks.Session(model, data(), run={"folder": "session"}, **tables)
for step in session:
    for batch in step:
        step.backward(nn.functional.cross_entropy(session.model(batch["x"]), batch["y"]))
"""
)


def losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics" / "rank-00000.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["event"] == "step"]


def test_all_three_give_the_same_losses(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples" / "own_model", tmp_path, dirs_exist_ok=True)
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "session.py").write_text(SESSION)
    by_job = closeranks("train", "job.toml", "-n", 2, "run.folder=job", "telemetry.report=false", cwd=tmp_path)
    by_train = closeranks("run", "-n", 2, "train.py", cwd=tmp_path)
    by_session = closeranks("run", "-n", 2, "session.py", cwd=tmp_path)
    assert [by_job.code, by_train.code, by_session.code] == [0, 0, 0], (by_job.err, by_train.err, by_session.err)
    expected = losses(tmp_path / "job")
    assert len(expected) == 100
    assert expected[-1] < 0.5 * expected[0]
    assert losses(tmp_path / "train") == expected
    assert losses(tmp_path / "session") == expected
    assert (tmp_path / "session" / "report.md").exists(), "the page stands where the script's own folder is"


@pytest.mark.slow
def test_plain_python_is_a_world_of_one(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples" / "own_model", tmp_path, dirs_exist_ok=True)
    (tmp_path / "train.py").write_text(TRAIN)
    subprocess.run([sys.executable, "train.py"], cwd=tmp_path, check=True, timeout=300)
    alone = losses(tmp_path / "train")
    by_job = closeranks("train", "job.toml", "-n", 1, "run.folder=job", "telemetry.report=false", cwd=tmp_path)
    assert by_job.code == 0, by_job.err
    assert alone == losses(tmp_path / "job")
