"""Safetensors files and folders, written by the library itself, read piece by piece; damaged and hostile ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from closeranks.checkpoint.weights import safetensors_file
from closeranks.checkpoint.weights.safetensors_folder import INDEX, open_safetensors
from closeranks.core.errors import CheckpointError
from closeranks.core.pieces import Piece
from closeranks.run.dry_run.live_bytes import LiveBytes

from .drawing import expected, pieces, some_tensors

TENSORS = some_tensors()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two files and an index."""
    place = tmp_path_factory.mktemp("hf")
    names = list(TENSORS)
    files = {"model-00001-of-00002.safetensors": names[:4], "model-00002-of-00002.safetensors": names[4:]}
    for file, own in files.items():
        save_file({name: TENSORS[name] for name in own}, place / file)
    where = {name: file for file, own in files.items() for name in own}
    (place / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return place


def test_names_shapes_and_formats(folder: Path) -> None:
    weights = open_safetensors(folder)
    assert weights.names() == {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}
    assert {name: weights.dtype(name) for name in TENSORS} == {name: one.dtype for name, one in TENSORS.items()}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), name=st.sampled_from(sorted(TENSORS)), band=st.sampled_from([1, 16, 40, 1 << 20]))
def test_every_piece_is_that_of_the_whole(
    folder: Path, data: st.DataObject, name: str, band: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safetensors_file, "BAND_BYTES", band)
    whole = TENSORS[name]
    piece = data.draw(pieces("called otherwise", tuple(whole.shape)))
    read = open_safetensors(folder).read(name, piece)
    assert read.dtype == whole.dtype
    assert read.shape == piece.local_shape
    assert torch.equal(read, expected(whole, piece))
    if whole.is_floating_point():
        wide = open_safetensors(folder).read(name, piece, torch.float64)
        assert torch.equal(wide, expected(whole.double(), piece))


def test_a_piece_takes_no_more_memory_than_itself_and_a_band(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_file, "BAND_BYTES", 4096)
    save_file({"big": torch.arange(512 * 256, dtype=torch.float32).view(512, 256)}, tmp_path / "one.safetensors")
    weights = open_safetensors(tmp_path / "one.safetensors")
    whole = Piece.whole("big", (512, 256))
    for piece in (whole.narrow(0, 128, 256), whole.narrow(1, 64, 128), whole.flattened(1000, 30_000)):
        with LiveBytes() as live:
            part = weights.read("big", piece)
        assert live.peak <= part.numel() * 4 + 4096 + 64
        with LiveBytes() as live:
            half = weights.read("big", piece, torch.bfloat16)
        assert live.peak <= half.numel() * 2 + 4096 + 64


def spoilt(folder: Path, **changes: Any) -> Path:
    """A folder with one file whose header says something else."""
    data = torch.zeros(4, 2)
    header = {"x": {"dtype": "F32", "shape": [4, 2], "data_offsets": [0, 32]}, **changes}
    text = json.dumps(header).encode()
    place = folder / "model.safetensors"
    place.write_bytes(len(text).to_bytes(8, "little") + text + data.numpy().tobytes())
    return folder


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"dtype": "F32", "shape": [4, 2], "data_offsets": [0, 64]}, "bytes that its shape needs"),
        ({"dtype": "F32", "shape": [8, 2], "data_offsets": [0, 64]}, "but its header describes"),
        ({"dtype": "F32", "shape": [4, 1], "data_offsets": [16, 32]}, "overlap or leave holes"),
        ({"dtype": "F32", "shape": [-4, -2], "data_offsets": [0, 32]}, "impossible offsets"),
        ({"dtype": "F32", "shape": [4, 2], "data_offsets": [-32, 0]}, "impossible offsets"),
        ({"dtype": "F32", "shape": [2.0, 4], "data_offsets": [0, 32]}, "impossible offsets"),
        ({"dtype": "F4", "shape": [4, 2], "data_offsets": [0, 32]}, "'x' .* is stored as 'F4'"),
        ({"dtype": "F32", "shape": [4, 2]}, "its header is not that"),
        ([], "its header is not that"),
    ],
)
def test_a_header_that_does_not_fit_its_file_is_refused(tmp_path: Path, row: object, said: str) -> None:
    assert open_safetensors(spoilt(tmp_path)).names() == {"x": (4, 2)}
    with pytest.raises(CheckpointError, match=said):
        open_safetensors(spoilt(tmp_path, x=row))


def test_two_tensors_in_one_place_are_refused(tmp_path: Path) -> None:
    row = {"dtype": "F32", "shape": [4, 2], "data_offsets": [0, 32]}
    with pytest.raises(CheckpointError, match="overlap or leave holes"):
        open_safetensors(spoilt(tmp_path, y=row))


@pytest.mark.parametrize("length", [0, 5, 8, 60, -1])
def test_a_file_cut_short_is_refused(tmp_path: Path, length: int) -> None:
    place = tmp_path / "model.safetensors"
    save_file({"x": torch.ones(4)}, place)
    data = place.read_bytes()
    place.write_bytes(data[:length])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        open_safetensors(tmp_path)


def test_a_file_cut_short_while_it_is_read_is_an_error_and_no_death(tmp_path: Path) -> None:
    place = tmp_path / "model.safetensors"
    save_file({"x": torch.ones(4096)}, place)
    weights = open_safetensors(tmp_path)
    place.write_bytes(place.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="ends too early"):
        weights.read("x", Piece.whole("x", (4096,)))


def with_index(folder: Path, table: object) -> Path:
    save_file({"x": torch.ones(4)}, folder / "part.safetensors")
    (folder / INDEX).write_text(json.dumps(table))
    return folder


@pytest.mark.parametrize(
    "name", ["../part.safetensors", "/etc/passwd", "sub/part.safetensors", "..", "", "a\0b", "..\\x", 7, None]
)
def test_an_index_that_leads_out_of_its_folder_is_refused(tmp_path: Path, name: object) -> None:
    with pytest.raises(CheckpointError, match="not in its folder"):
        open_safetensors(with_index(tmp_path, {"weight_map": {"x": name}}))


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"weight_map": {"x": "gone.safetensors"}}, "is incomplete: gone.safetensors"),
        ({"weight_map": {"x": "part.safetensors", "y": "part.safetensors"}}, "looks for 'y' in part.safetensors"),
        ({"weight_map": {}}, "no weight_map"),
        ({}, "no weight_map"),
        ([1], "is not a JSON object"),
    ],
)
def test_an_index_that_does_not_fit_the_files_is_refused(tmp_path: Path, table: object, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        open_safetensors(with_index(tmp_path, table))


def test_a_tensor_that_the_index_leaves_out_is_refused(tmp_path: Path) -> None:
    save_file({"x": torch.ones(4), "y": torch.ones(2)}, tmp_path / "part.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"x": "part.safetensors"}}))
    with pytest.raises(CheckpointError, match="holds 'y', which"):
        open_safetensors(tmp_path)


def test_an_index_that_is_no_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text("{")
    with pytest.raises(CheckpointError, match="it is not JSON"):
        open_safetensors(tmp_path)
