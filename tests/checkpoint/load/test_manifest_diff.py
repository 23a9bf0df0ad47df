"""Two checkpoints compared: by digests, and by how much where they are read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from closeranks.checkpoint.load import value_diff
from closeranks.checkpoint.load.manifest_diff import diff_manifests, tree_differences
from closeranks.checkpoint.load.resharding_reader import CheckpointReader
from closeranks.checkpoint.load.value_diff import LargestDifference, largest_difference
from closeranks.storage.local import LocalStorage
from tests.checkpoint import making
from tests.checkpoint.making import Whole, a_state, by_ranges, filled


def test_cuts_do_not_matter_and_one_bit_does(tmp_path: Path) -> None:
    state = a_state()
    a = making.write(tmp_path, 20, state)
    assert {
        row.verdict for row in diff_manifests(a, making.write(tmp_path, 40, state, cut=by_ranges, num_ranks=3))
    } == {"equal"}
    octets = bytearray(state["model", "head.weight"].values.tobytes())
    octets[7] ^= 128
    changed = np.frombuffer(bytes(octets), "V2").reshape(5, 3, 2)
    b = making.write(tmp_path, 60, {**state, ("model", "head.weight"): Whole("bfloat16", changed)}, num_ranks=1)
    assert [row.key for row in diff_manifests(a, b) if row.verdict == "differs"] == ["head.weight"]


def test_every_verdict_once(tmp_path: Path) -> None:
    a = making.write(tmp_path, 20, {("m", k): Whole("float32", filled((4,), "float32", 0)) for k in "abcd"})
    b = making.write(
        tmp_path,
        40,
        {
            ("m", "a"): Whole("float32", filled((4,), "float32", 0)),
            ("m", "b"): Whole("float32", filled((2, 2), "float32", 0)),
            ("m", "c"): Whole("int32", filled((4,), "float32", 0)),
            ("m", "e"): Whole("int32", filled((4,), "float32", 0)),
        },
    )
    rows = {row.key: row for row in diff_manifests(a, b)}
    verdicts = {key: row.verdict for key, row in rows.items()}
    assert verdicts == {"a": "equal", "b": "shape", "c": "dtype", "d": "only in A", "e": "only in B"}
    assert rows["d"].b is None
    assert rows["b"].a is not None
    assert rows["b"].a.digest == rows["b"].b.digest  # type: ignore[union-attr]


def test_trees() -> None:
    a = {"progress": {"step": 20, "position": 5}, "same": [1, 2], "gone": 1, "one": 1}
    b = {"progress": {"step": 40, "position": 5}, "same": [1, 2], "new": None, "one": True}
    assert tree_differences(a, b) == ["progress.step: 20 | 40", "gone: only in A", "one: 1 | True", "new: only in B"]
    assert tree_differences(a, a) == []


def largest(root: Path, a: torch.Tensor, b: torch.Tensor) -> LargestDifference:
    for step, tensor in ((20, a), (40, b)):
        name = str(tensor.dtype).removeprefix("torch.")
        octets = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        held = np.frombuffer(octets, f"V{tensor.element_size()}").reshape(tensor.shape)
        making.write(root, step, {("model", "x"): Whole(name, held)}, cut=by_ranges)
    one, other = (CheckpointReader(LocalStorage(root), f"step-000000{step}") for step in (20, 40))
    return largest_difference(one, other, "model", "x")


def test_the_largest_difference_over_several_ranges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(value_diff, "_RANGE", 7)
    a = torch.arange(1.0, 41.0).reshape(8, 5)
    b = a.clone()
    b[0, 1], b[7, 3] = 1.0, 42.0
    assert largest(tmp_path, a, b) == LargestDifference(2, 3.0, 0.5)
    assert largest(tmp_path, a, a) == LargestDifference(0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (torch.tensor([float("nan"), 1.0]), torch.tensor([float("nan"), 1.0]), LargestDifference(0, 0.0, 0.0)),
        (torch.tensor([float("nan"), 1.0]), torch.tensor([2.0, 1.0]), LargestDifference(1, float("inf"), float("inf"))),
        (torch.tensor([0.0]), torch.tensor([-0.0]), LargestDifference(1, 0.0, 0.0)),
        (torch.tensor([True, False]), torch.tensor([True, True]), LargestDifference(1, 1.0, 1.0)),
        (torch.tensor([1.5]).bfloat16(), torch.tensor([1.0]), LargestDifference(1, 0.5, 0.5 / 1.5)),
        (torch.tensor([3 + 4j]), torch.tensor([0j]), LargestDifference(1, 5.0, 1.0)),
        (torch.tensor(7), torch.tensor(8), LargestDifference(1, 1.0, 0.125)),
    ],
)
def test_types_and_corners(tmp_path: Path, a: torch.Tensor, b: torch.Tensor, expected: LargestDifference) -> None:
    assert largest(tmp_path, a, b) == expected
