from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.checkpoint import making
from tests.checkpoint.making import Whole, a_state, by_ranges, filled
from tests.cli.ckpt.calling import ckpt


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """B has other values, another shape, another type, one tensor less and one more, and was cut in another way."""
    a, b = tmp_path / "a", tmp_path / "b"
    numbers = np.arange(12, dtype=np.float32).reshape(3, 4)
    state = {**a_state(), ("model", "numbers"): Whole("float32", numbers)}
    other = {
        **state,
        ("model", "numbers"): Whole("float32", np.where(numbers == 8, 10, numbers).astype(np.float32)),
        ("model", "mask"): Whole("bool", filled((3, 3), "bool", 2)),
        ("other", "scale"): Whole("float8_e5m2", state["other", "scale"].values),
        ("other", "more"): Whole("float32", filled((2,), "float32", 0)),
    }
    del other["model", "head.weight"]
    making.write(a, 40, state, tree={"progress": {"step": 40}, "only": 1})
    making.write(b, 40, other, cut=by_ranges, num_ranks=3, tree={"progress": {"step": 41}})
    return a, b


def test_every_kind_of_difference(pair: tuple[Path, Path]) -> None:
    said = ckpt("diff", *pair)
    assert said.code == 1
    verdicts = {line.split()[0]: line for line in said.out.splitlines() if "/" in line.split("  ")[0]}
    assert " differs " in verdicts["model/numbers"]
    assert " shape " in verdicts["model/mask"]
    assert " 9 bool " in verdicts["model/mask"]
    assert " dtype " in verdicts["other/scale"]
    assert " only in A " in verdicts["model/head.weight"]
    assert " only in B " in verdicts["other/more"]
    assert "model/embed.weight" not in verdicts
    assert "progress.step: 40 | 41" in said.out
    assert "4 of 9 tensors are equal" in said.out


def test_by_how_much(pair: tuple[Path, Path]) -> None:
    told = json.loads(ckpt("diff", *pair, "--values", "--json").out)
    rows = {f"{row['section']}/{row['key']}": row for row in told["tensors"]}
    assert rows["model/numbers"]["largest"] == {"num_different": 1, "absolute": 2.0, "relative": 0.2}
    assert "largest" not in rows["model/mask"]
    assert told["is_equal"] is False
    said = ckpt("diff", *pair, "--values", "model/numbers")
    assert said.out.splitlines()[-3].split()[-3:] == ["1", "2", "0.2"]


def test_equal_whatever_layout_saved_them(tmp_path: Path) -> None:
    making.write(tmp_path / "a", 40, a_state())
    making.write(tmp_path / "b", 60, a_state(), cut=by_ranges, num_ranks=4)
    said = ckpt("diff", tmp_path / "a", tmp_path / "b", "--all")
    assert said.code == 0
    assert "7 of 7 tensors are equal" in said.out
    assert said.out.count(" equal ") == 7


def test_bad_input(tmp_path: Path) -> None:
    making.write(tmp_path / "a", 40, a_state())
    assert ckpt("diff", tmp_path / "a", tmp_path / "nonesuch").code == 2
    said = ckpt("diff", tmp_path / "a", tmp_path / "a", "nonesuch*")
    assert said.code == 2
    assert "no tensor of" in said.err
