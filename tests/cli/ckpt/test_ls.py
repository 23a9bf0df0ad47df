from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from closeranks.telemetry.terminal_table import align_columns
from tests.checkpoint import making
from tests.checkpoint.making import Whole, a_state, filled
from tests.cli.ckpt.calling import ckpt


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A full checkpoint, one that refers to it, one whose manifest is damaged, one that was cut short."""
    root = tmp_path / "checkpoints"
    base = making.write(root, 20, a_state(), metric=1.25)
    state = {**a_state(), ("model", "mask"): Whole("bool", filled((9,), "bool", 77))}
    making.write(root, 40, state, base=base)
    making.write(root, 60, a_state(), is_latest=False)
    (root / "step-00000060" / "manifest.json").write_text("{}")
    (root / "step-00000080").mkdir()
    (root / "step-00000080" / "data-00000-of-00002.safetensors").write_bytes(b"torn")
    (root / "notes.txt").write_text("mine")
    return tmp_path


def test_a_row_for_each_with_its_state(run: Path) -> None:
    said = ckpt("ls", run)
    assert said.code == 0
    rows = [line for line in said.out.splitlines() if " step-" in f" {line}" and "state" not in line][:4]
    assert [row.lstrip("* ").split()[0] for row in rows] == [f"step-000000{step}" for step in (80, 60, 40, 20)]
    unfinished, damaged, newest, base = rows
    assert "unfinished" in unfinished
    assert "damaged" in damaged
    assert newest.startswith("*")
    assert "certified, latest" in newest
    assert " refs " in newest
    assert " full " in base
    assert " 1.25 " in base
    assert " data=2 " in base
    assert "notes.txt is not written by closeranks" in said.out
    assert "step-00000060: " in said.out


def test_as_json_and_by_every_kind_of_place(run: Path) -> None:
    whole = json.loads(ckpt("ls", run, "--json").out)
    assert [row["state"] for row in whole["checkpoints"]] == ["unfinished", "damaged", "certified", "certified"]
    newest = whole["checkpoints"][2]
    assert (newest["is_latest"], newest["is_next"], newest["is_full"]) == (True, True, False)
    assert newest["refers_to"] == [f"step-00000020/data-0000{rank}-of-00002.safetensors" for rank in (0, 1)]
    assert newest["num_bytes"] == whole["checkpoints"][3]["num_bytes"]
    for place in (run / "checkpoints", f"file://{run}"):
        assert json.loads(ckpt("ls", place, "--json").out)["checkpoints"] == whole["checkpoints"]
    one = json.loads(ckpt("ls", run / "checkpoints" / "step-00000020", "--json").out)
    assert [row["name"] for row in one["checkpoints"]] == ["step-00000020"]


def test_nothing_there_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / "run" / "metrics").mkdir(parents=True)
    (tmp_path / "run" / "metrics" / "rank-00000.jsonl").touch()
    (tmp_path / "empty").mkdir()
    for place, what in (
        (tmp_path / "nonesuch", "there is nothing at"),
        (tmp_path / "empty", "there are no checkpoints at"),
        (tmp_path / "run", "has no checkpoints (checkpoint.save was off"),
        ("", "the path is empty"),
    ):
        said = ckpt("ls", place)
        assert (said.code, said.out, said.err.count("\n")) == (2, "", 1)
        assert what in said.err


def test_a_narrow_terminal_loses_columns_and_never_letters() -> None:
    rows = [("*", "step-00000080", "14.3 MiB", "certified, latest"), ("", "step-00000060", "5 B", "certified")]
    headings = ("", "name", "size", "state")
    wide, left_out = align_columns(headings, rows, ("size",), ("size", "state"), None)
    assert wide[1:] == ["*  step-00000080  14.3 MiB  certified, latest", "   step-00000060       5 B  certified"]
    assert left_out == []
    assert align_columns(headings, rows, ("size",), ("size", "state"), len(wide[1])) == (wide, [])
    narrow, left_out = align_columns(headings, rows, ("size",), ("size", "state"), len(wide[1]) - 1)
    assert narrow[1:] == ["*  step-00000080  certified, latest", "   step-00000060  certified"]
    assert left_out == ["size"]
    assert align_columns(headings, rows, (), ("size",), 10)[0] == narrow


def test_no_verb_imports_torch_to_look_at_manifests(run: Path) -> None:
    script = """
import sys
from tests.cli.ckpt.calling import ckpt
place = sys.argv[1]
codes = [ckpt("ls", place).code, ckpt("show", place).code, ckpt("verify", place).code, ckpt("diff", place, place).code]
print(codes, "torch" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(run)],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.strip() == "[0, 0, 1, 0] False", done.stderr


def test_the_number_behind_a_step_is_explained(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    making.write(root, 120, a_state(), part=2)
    said = ckpt("ls", tmp_path)
    assert (
        "step-00000120-2: saved after the run was opened for the 2nd time; a higher number is always newer" in said.out
    )
    making.write(root, 140, a_state())
    (root / "step-00000120-2" / "manifest.json").unlink()
    assert "2nd time" in ckpt("ls", tmp_path).out
    plain = tmp_path / "plain"
    making.write(plain / "checkpoints", 120, a_state())
    assert "time;" not in ckpt("ls", plain).out
