"""What kind of weights lies in a place, and what is said where it is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from closeranks.checkpoint.weights.hf_shards import NoProgress, plan_export
from closeranks.checkpoint.weights.open import DCP, OURS, SAFETENSORS, TORCH, detect_format, open_weights
from closeranks.checkpoint.weights.protocol import row_bands
from closeranks.checkpoint.weights.save_weights import save_weights
from closeranks.checkpoint.weights.torch_file import TorchFile
from closeranks.core.errors import CheckpointError
from closeranks.core.pieces import Piece

from .drawing import some_tensors


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["model.safetensors", "config.json"], SAFETENSORS),
        (["model.safetensors.index.json"], SAFETENSORS),
        (["pytorch_model.bin", "config.json"], TORCH),
        (["pytorch_model.bin.index.json"], TORCH),
        (["model.safetensors", "pytorch_model.bin"], SAFETENSORS),
        ([".metadata", "__0_0.distcp"], DCP),
        (["manifest.json", "data-00000-of-00001.safetensors"], OURS),
        (["latest"], OURS),
        (["checkpoints/latest", "config.json", "job.toml"], OURS),
        (["step-00000004/manifest.json"], OURS),
    ],
)
def test_folders_are_known_by_what_is_in_them(tmp_path: Path, names: list[str], kind: str) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert detect_format(str(tmp_path)) == kind
    assert detect_format(f"file://{tmp_path}") == kind


@pytest.mark.parametrize(
    ("name", "kind"), [("a.safetensors", SAFETENSORS), ("a.pt", TORCH), ("a.pth", TORCH), ("a.bin", TORCH)]
)
def test_files_are_known_by_their_ending(tmp_path: Path, name: str, kind: str) -> None:
    (tmp_path / name).touch()
    assert detect_format(str(tmp_path / name)) == kind


def test_a_url_is_a_place_of_ours() -> None:
    assert detect_format("s3://bucket/run") == OURS


def test_what_is_not_there_or_not_known_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is nothing at"):
        open_weights(str(tmp_path / "gone"))
    with pytest.raises(CheckpointError, match="holds no weights in a supported format"):
        open_weights(str(tmp_path))
    (tmp_path / "notes.txt").touch()
    with pytest.raises(CheckpointError, match="holds no weights in a supported format"):
        open_weights(str(tmp_path / "notes.txt"))


def test_every_kind_gives_the_same_values(tmp_path: Path) -> None:
    tensors = some_tensors()
    save_file(tensors, tmp_path / "a.safetensors")
    torch.save(tensors, tmp_path / "a.pt")
    held = TorchFile("memory", tensors, ())
    save_weights(
        str(tmp_path / "run" / "checkpoints"), held, plan_export(held, {n: n for n in tensors}), {}, NoProgress()
    )
    for name in ("a.safetensors", "a.pt", "run"):
        weights = open_weights(str(tmp_path / name))
        assert dict(weights.names()) == {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        for key, tensor in tensors.items():
            found = weights.read(key, Piece.whole("another", tuple(tensor.shape)))
            assert found.dtype == weights.dtype(key) == tensor.dtype
            assert torch.equal(found, tensor)


def test_a_row_larger_than_a_chunk_is_taken_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("closeranks.checkpoint.weights.save_weights.CHUNK_BYTES", 64)
    held = TorchFile("memory", {"wide": torch.randn(2, 100), "flat": torch.randn(50)}, ())
    save_weights(str(tmp_path), held, plan_export(held, {name: name for name in held.names()}), {}, NoProgress())
    weights = open_weights(str(tmp_path))
    for name, shape in held.names().items():
        piece = Piece.whole(name, shape)
        assert torch.equal(weights.read(name, piece), held.read(name, piece))


def test_bands_cover_a_piece_in_order() -> None:
    whole = Piece.whole("x", (10, 3))
    rows = list(row_bands(whole.narrow(0, 2, 9), 4, 24))
    assert [(band.piece.start[0], band.length, band.first) for band in rows] == [
        (2, 2, 0),
        (4, 2, 2),
        (6, 2, 4),
        (8, 1, 6),
    ]
    flat = list(row_bands(whole.flattened(5, 12), 4, 12))
    assert [(band.piece.flat, band.first) for band in flat] == [((5, 8), 0), ((8, 11), 3), ((11, 12), 6)]
    assert [band.length for band in row_bands(Piece.whole("x", (3, 1000)), 4, 24)] == [1, 1, 1]
    assert [band.piece for band in row_bands(Piece.whole("x", ()), 8)] == [Piece.whole("x", ())]
    assert not list(row_bands(Piece.whole("x", (0, 4)), 4))
