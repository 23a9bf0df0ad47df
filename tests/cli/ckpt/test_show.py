from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.checkpoint import making
from tests.checkpoint.making import Whole, a_state, by_ranges, filled
from tests.cli.ckpt.calling import ckpt

TREE = {"progress": {"step": 40, "position": 1280}, "config": {"name": "tiny[1]", "groups": [1, 2], "empty": {}}}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    making.write(tmp_path / "checkpoints", 20, a_state())
    making.write(tmp_path / "checkpoints", 40, a_state(), cut=by_ranges, tree=TREE)
    return tmp_path


def test_values_and_tensors(run: Path) -> None:
    said = ckpt("show", run)
    assert said.code == 0
    assert f"{run}/checkpoints/step-00000040: step 40" in said.out
    for line in ("progress", "  position = 1280", "  name = tiny[1]", "  groups = [1, 2]", "  empty = {}"):
        assert f"  {line}\n" in said.out
    words = next(line for line in said.out.splitlines() if "head.weight" in line).split()
    assert words[:4] == ["head.weight", "5x3x2", "bfloat16", "60"]
    assert words[5] == "4"
    assert "model: 3 tensors" in said.out
    step = next(line for line in said.out.splitlines() if "embed.weight/step" in line).split()
    assert step[1] == "number"


def test_the_digest_is_that_of_the_whole_tensor_in_any_cut(run: Path) -> None:
    told = [
        json.loads(ckpt("show", run / "checkpoints" / name, "--json").out)
        for name in ("step-00000020", "step-00000040")
    ]
    digests = [{row["key"]: row["digest"] for row in one["tensors"]} for one in told]
    assert digests[0] == digests[1]
    assert told[1]["tree"] == TREE


def test_patterns_choose_tensors_and_leave_the_tree_out(run: Path) -> None:
    said = ckpt("show", run, "optimizer/*", "mask")
    keys = [line.split()[0] for line in said.out.splitlines() if line.startswith("  ") and "digest" not in line]
    assert keys == ["mask", "embed.weight/exp_avg", "embed.weight/step"]
    assert "progress" not in said.out
    said = ckpt("show", run, "nonesuch*")
    assert (said.code, said.out) == (2, "")
    assert "no tensor of" in said.err


def test_layers_come_in_their_order_whatever_rank_saved_them(tmp_path: Path) -> None:
    state = {("model", f"layers.{n}.w"): Whole("float32", filled((2,), "float32", n)) for n in (10, 2, 9, 0)}
    making.write(tmp_path, 20, state)
    keys = [
        line.split()[0] for line in ckpt("show", tmp_path, "model/*").out.splitlines() if line.startswith("  layers")
    ]
    assert keys == [f"layers.{n}.w" for n in (0, 2, 9, 10)]


def test_a_damaged_one_is_passed_over_in_a_run_and_refused_by_name(run: Path) -> None:
    (run / "checkpoints" / "step-00000040" / "manifest.json").write_bytes(b"")
    assert "step-00000020: step 20" in ckpt("show", run).out
    said = ckpt("show", run / "checkpoints" / "step-00000040")
    assert said.code == 2
    assert "manifest.json is damaged" in said.err
