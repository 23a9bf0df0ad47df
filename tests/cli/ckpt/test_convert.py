"""What does ``closeranks ckpt convert`` do, say and answer?"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.cli.ckpt.calling import ckpt


@pytest.fixture
def source(tmp_path: Path) -> Path:
    torch.save({"state_dict": {"w": torch.ones(2, 3), "b": torch.zeros(3)}}, tmp_path / "in.pt")
    return tmp_path / "in.pt"


def test_it_writes_and_says_what(source: Path, tmp_path: Path) -> None:
    said = ckpt("convert", source, tmp_path / "out", "--to", "dcp")
    assert said.code == 0
    assert said.out == f"{tmp_path}/out: dcp, 2 tensors, 36 bytes, from {source}\n"
    assert "were found under 'state_dict'" in said.err
    assert (tmp_path / "out/.metadata").is_file()
    said = ckpt("convert", tmp_path / "out", tmp_path / "back", "--to", "closeranks")
    assert said.code == 0
    assert "checkpoint with weights only, 2 tensors" in said.out
    assert (tmp_path / "back/latest").is_file()


def test_what_a_person_can_mend_is_one_sentence(source: Path, tmp_path: Path) -> None:
    for words in ((source, source, "--to", "torch"), (tmp_path / "none", tmp_path / "out", "--to", "torch")):
        said = ckpt("convert", *words)
        assert said.code == 2
        assert said.err.startswith("closeranks: ")
        assert said.err.count("\n") == 1


def test_a_file_that_would_not_be_known_again_is_noted(source: Path, tmp_path: Path) -> None:
    assert "NAME.pt or " in ckpt("convert", source, tmp_path / "out", "--to", "torch").err
    assert "NAME" not in ckpt("convert", source, tmp_path / "out.pt", "--to", "torch").err
    assert "NAME" not in ckpt("convert", source, tmp_path / "folder", "--to", "dcp").err


def test_the_format_must_be_one_of_four(source: Path, tmp_path: Path) -> None:
    assert ckpt("convert", source, tmp_path / "out", "--to", "onnx").code == 2
    assert ckpt("convert", source, tmp_path / "out").code == 2
