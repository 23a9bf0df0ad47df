"""How many workers start where nobody says, and what is told where the launcher has decided."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from closeranks.cli.main import build_app
from closeranks.run.job import launch
from tests.cli.commands import TINY, closeranks


@pytest.mark.parametrize(
    ("arguments", "visible", "expected"),
    [
        (["layout.data=0"], "", 1),
        (["layout.data=2"], "", 2),
        (["layout.data=0"], "0,1", 2),
        (["layout.data=0"], "0,1,-1,2", 2),
        (["-n", "3", "layout.data=0"], "0,1", 3),
    ],
    ids=["one", "as the layout says", "one per visible GPU", "as CUDA counts them", "as the person says"],
)
def test_workers_where_nobody_says_how_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], visible: str, expected: int
) -> None:
    started: list[int] = []
    monkeypatch.setattr(launch, "_start", lambda work, num_workers: started.append(num_workers))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(sys, "path", list(sys.path))
    build_app()(["train", TINY, *arguments, f"run.folder={tmp_path}/run"], standalone_mode=False)
    assert started == [expected]


def under_torchrun(tmp_path: Path, *arguments: str, size: int = 1) -> tuple[int, str]:
    env = {"RANK": "0", "WORLD_SIZE": str(size), "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    done = closeranks("train", TINY, *arguments, cwd=tmp_path, env=env)
    return done.code, done.err


def test_a_launchers_number_of_workers_stands(tmp_path: Path) -> None:
    code, err = under_torchrun(tmp_path, "-n", "3", size=2)
    assert code == 2
    assert "3 were asked for, but torchrun has started 2 workers. Leave it out." in err


def test_a_mistake_under_a_launcher_is_told_once_and_nothing_else(tmp_path: Path) -> None:
    code, err = under_torchrun(tmp_path, "train.stepz=3")
    assert code == 2
    assert err.count("train.stepz") == 1
    assert "Values of the job are written" not in err, "it was understood very well"


def test_a_flag_that_does_not_exist_is_told_how_values_are_written(tmp_path: Path) -> None:
    done = closeranks("train", TINY, "--steps", 5, cwd=tmp_path)
    assert done.code == 2
    assert "--steps" in done.err
    assert "table.key=value, such as train.steps=200" in done.err
