"""The state file: bit-exact, whole or refused, never pickled."""

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from closeranks.checkpoint.single import FILE_NAME, load_tree, save_tree
from closeranks.core.errors import CheckpointError, SetupError


def tree() -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "model": {"a.weight": torch.randn(4, 3), "empty": torch.zeros(0), "scalar": torch.tensor(2.5).double()},
        "optimizer": {"state": {"a.weight": {"m": torch.randn(4, 3).bfloat16(), "step": torch.tensor(3)}}},
        "progress": {"step": 7, "name": "x", "none": None, "list": [1, 2.5, "z"], "flag": True},
    }


def same(left: Any, right: Any) -> bool:
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)
    return type(left) is type(right) and left == right


def test_round_trip_is_exact(tmp_path: Path) -> None:
    path = tmp_path / "x" / FILE_NAME
    num_bytes = save_tree(tree(), path)
    assert path.stat().st_size == num_bytes
    assert same(load_tree(path), tree())
    assert same(load_tree(path.parent), tree())
    assert os.listdir(path.parent) == [FILE_NAME]


def test_safetensors_itself_reads_it(tmp_path: Path) -> None:
    save_tree(tree(), tmp_path / FILE_NAME)
    with safe_open(tmp_path / FILE_NAME, framework="pt") as file:
        assert torch.equal(file.get_tensor("model/a.weight"), tree()["model"]["a.weight"])


@pytest.mark.parametrize("place", [-1, -40, 300])
def test_a_flipped_bit_is_refused(tmp_path: Path, place: int) -> None:
    path = tmp_path / FILE_NAME
    save_tree(tree(), path)
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"damaged|not a state file"):
        load_tree(path)


def test_no_bit_of_the_header_can_flip_unseen(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    save_tree(tree(), path)
    data = path.read_bytes()
    end = 8 + struct.unpack("<Q", data[:8])[0]
    text = data[8:end].decode().rstrip()
    for place in range(8, 8 + len(text)):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        try:
            assert same(load_tree(path), tree()), data[place - 20 : place + 20]
        except CheckpointError:
            continue


@pytest.mark.parametrize("size", [0, 5, 100, -1])
def test_a_torn_file_is_refused(tmp_path: Path, size: int) -> None:
    path = tmp_path / FILE_NAME
    save_tree(tree(), path)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(CheckpointError, match="damaged"):
        load_tree(path)


def test_a_pickle_and_a_foreign_safetensors_are_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1)}, tmp_path / "pickle.pt")
    header = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "foreign").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 4)
    for name in ("pickle.pt", "foreign"):
        with pytest.raises(CheckpointError):
            load_tree(tmp_path / name)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no state file at"):
        load_tree(tmp_path / "nowhere")


def test_a_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    save_tree(tree(), path)
    before = path.read_bytes()
    # A file-size limit is a full disk as a write sees it, without needing a mount.
    import resource
    import signal

    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, old[1]))
    try:
        with pytest.raises(SetupError, match="could not be saved"):
            save_tree(tree(), path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, previous)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == [FILE_NAME]
