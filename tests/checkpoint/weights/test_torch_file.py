"""Files of torch.save: nested and wrapped ones; damaged, old and hostile ones, whose payload must not run."""

from __future__ import annotations

import argparse
import os
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from closeranks.checkpoint.weights.torch_file import open_torch, plain_names
from closeranks.core.errors import CheckpointError
from closeranks.core.pieces import Piece

from .drawing import expected, pieces, some_tensors

TENSORS = some_tensors()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("torch") / "model.pt"
    torch.save(TENSORS, place)
    return place


def test_names_shapes_and_formats(file: Path) -> None:
    weights = open_torch(file)
    assert weights.names() == {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}
    assert {name: weights.dtype(name) for name in TENSORS} == {name: one.dtype for name, one in TENSORS.items()}
    assert weights.notes == ()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), name=st.sampled_from(sorted(TENSORS)))
def test_every_piece_is_that_of_the_whole(file: Path, data: st.DataObject, name: str) -> None:
    whole = TENSORS[name]
    piece = data.draw(pieces(name, tuple(whole.shape)))
    read = open_torch(file).read(name, piece)
    assert read.dtype == whole.dtype
    assert read.shape == piece.local_shape
    assert torch.equal(read, expected(whole, piece))


def test_what_is_read_is_not_the_file_itself(file: Path) -> None:
    weights, piece = open_torch(file), Piece.whole("a.bias", (5,))
    weights.read("a.bias", piece).zero_()
    assert torch.equal(weights.read("a.bias", piece), TENSORS["a.bias"])


@pytest.mark.parametrize("key", ["model", "state_dict", "module"])
def test_weights_are_found_beside_other_things(tmp_path: Path, key: str) -> None:
    torch.save({key: {"x": torch.ones(2)}, "step": torch.tensor(3), "epoch": 1, "args": [1, None]}, tmp_path / "a.pt")
    weights = open_torch(tmp_path / "a.pt")
    assert weights.names() == {"x": (2,)}
    assert f"under '{key}'" in weights.notes[0]


@pytest.mark.parametrize(
    ("names", "plain"),
    [
        (["module.a.weight", "module.b"], ["a.weight", "b"]),
        (["_orig_mod.a.weight", "b._orig_mod.c"], ["a.weight", "b.c"]),
        (["_orig_mod.module.a", "_orig_mod.module.b"], ["a", "b"]),
        (["module.module.a"], ["a"]),
        (["a._fsdp_wrapped_module.b", "a._checkpoint_wrapped_module.c"], ["a.b", "a.c"]),
        (["module.a", "b"], ["module.a", "b"]),
        (["a.module.b"], ["a.module.b"]),
        (["module."], ["module."]),
    ],
)
def test_wrappers_are_taken_off_names(names: list[str], plain: list[str]) -> None:
    assert list(plain_names(names).values()) == plain


def test_names_without_their_wrappers_are_told_of(tmp_path: Path) -> None:
    torch.save(OrderedDict({"module.x": torch.ones(2)}), tmp_path / "a.pth")
    weights = open_torch(tmp_path / "a.pth")
    assert weights.names() == {"x": (2,)}
    assert "'module.x' as 'x'" in weights.notes[0]


def test_two_names_that_differ_by_wrappers_alone_are_refused(tmp_path: Path) -> None:
    torch.save({"x": torch.ones(2), "_orig_mod.x": torch.zeros(2)}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="duplicate tensor names"):
        open_torch(tmp_path / "a.pt")


def test_a_folder_of_several_files(tmp_path: Path) -> None:
    torch.save({"x": torch.ones(2)}, tmp_path / "pytorch_model-00001-of-00002.bin")
    torch.save({"y": torch.zeros(3)}, tmp_path / "pytorch_model-00002-of-00002.bin")
    (tmp_path / "pytorch_model.bin.index.json").write_text(
        '{"weight_map": {"x": "pytorch_model-00001-of-00002.bin", "y": "pytorch_model-00002-of-00002.bin"}}'
    )
    assert open_torch(tmp_path).names() == {"x": (2,), "y": (3,)}


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.trace),)


def test_a_pickle_that_would_run_code_is_refused_and_does_not_run_it(tmp_path: Path) -> None:
    trace = tmp_path / "executed"
    torch.save({"x": torch.ones(2), "hook": Payload(trace)}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"holds more than tensors .*mkdir.* nothing in it was executed"):
        open_torch(tmp_path / "a.pt")
    assert not trace.exists()
    torch.load(tmp_path / "a.pt", weights_only=False)  # the payload is a real one
    assert trace.exists()


def test_objects_of_other_classes_are_refused_by_name(tmp_path: Path) -> None:
    torch.save({"model": {"x": torch.ones(2)}, "args": argparse.Namespace(lr=1)}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"argparse\.Namespace"):
        open_torch(tmp_path / "a.pt")


def test_a_plain_pickle_is_not_even_opened(tmp_path: Path) -> None:
    trace = tmp_path / "executed"
    (tmp_path / "a.pt").write_bytes(pickle.dumps(Payload(trace)))
    with pytest.raises(CheckpointError, match="or a plain pickle"):
        open_torch(tmp_path / "a.pt")
    assert not trace.exists()


def test_the_old_format_is_refused_by_name(tmp_path: Path) -> None:
    torch.save({"x": torch.ones(2)}, tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=r"before 1\.6"):
        open_torch(tmp_path / "a.pt")


def test_every_flipped_bit_of_the_values_is_found(tmp_path: Path) -> None:
    """torch.load itself reads them without a word."""
    place = tmp_path / "a.pt"
    torch.save({"x": torch.arange(1.0, 65.0)}, place)
    data = place.read_bytes()
    with zipfile.ZipFile(place) as archive:
        start = data.index(archive.read("a/data/0"), archive.getinfo("a/data/0").header_offset + 30)
    for bit in range(start * 8, (start + 256) * 8, 97):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        place.write_bytes(flipped)
        with pytest.raises(CheckpointError, match="a checksum does not match"):
            open_torch(place)


@pytest.mark.parametrize("length", [0, 1, 100, -1, -30])
def test_a_file_cut_short_is_refused(tmp_path: Path, length: int) -> None:
    place = tmp_path / "a.pt"
    torch.save({"x": torch.ones(64)}, place)
    place.write_bytes(place.read_bytes()[:length])
    with pytest.raises(CheckpointError, match=r"a\.pt is damaged"):
        open_torch(place)


def test_a_zip_that_torch_did_not_write_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
        archive.writestr("readme.txt", "hello")
    with pytest.raises(CheckpointError, match="torch cannot read it"):
        open_torch(tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "b.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("bomb", b"\0" * 1_000_000)
    with pytest.raises(CheckpointError, match="it is compressed"):
        open_torch(tmp_path / "b.pt")


@pytest.mark.parametrize("value", [[1, 2], {"step": 3}, {"model": {"a": 1}}, torch.ones(3)])
def test_a_file_without_weights_is_refused(tmp_path: Path, value: object) -> None:
    torch.save(value, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="holds no weights"):
        open_torch(tmp_path / "a.pt")


def test_parameters_come_as_plain_values(tmp_path: Path) -> None:
    torch.save(dict(torch.nn.Linear(3, 2).named_parameters()), tmp_path / "a.pt")
    assert not open_torch(tmp_path / "a.pt").read("weight", Piece.whole("weight", (2, 3))).requires_grad


def test_a_file_saved_without_checksums_is_told_of(tmp_path: Path) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"x": torch.ones(2)}, tmp_path / "a.pt")
    finally:
        torch.serialization.set_crc32_options(before)
    weights = open_torch(tmp_path / "a.pt")
    assert "without checksums" in weights.notes[0]
    assert torch.equal(weights.read("x", Piece.whole("x", (2,))), torch.ones(2))


def test_sparse_weights_are_refused(tmp_path: Path) -> None:
    torch.save({"x": torch.eye(3).to_sparse()}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"'x' .* sparse"):
        open_torch(tmp_path / "a.pt")
