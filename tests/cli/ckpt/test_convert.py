"""What does ``closeranks ckpt convert`` do, say and answer?"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from closeranks.cli.ckpt import convert
from closeranks.core.errors import CheckpointError


def ask(*words: object) -> tuple[int, str, str, BaseException | None]:
    app = typer.Typer()
    convert.register(app)
    done = CliRunner().invoke(app, [str(word) for word in words])
    return done.exit_code, done.stdout, done.stderr, done.exception


@pytest.fixture
def source(tmp_path: Path) -> Path:
    torch.save({"state_dict": {"w": torch.ones(2, 3), "b": torch.zeros(3)}}, tmp_path / "in.pt")
    return tmp_path / "in.pt"


def test_it_writes_and_says_what(source: Path, tmp_path: Path) -> None:
    code, out, said, _ = ask(source, tmp_path / "out", "--to", "dcp")
    assert code == 0
    assert out == f"{tmp_path}/out: dcp, 2 tensors, 36 bytes, from {source}\n"
    assert "were found under 'state_dict'" in said
    assert (tmp_path / "out/.metadata").is_file()
    code, out, _, _ = ask(tmp_path / "out", tmp_path / "back", "--to", "closeranks")
    assert code == 0
    assert "checkpoint of weights alone, 2 tensors" in out
    assert (tmp_path / "back/latest").is_file()


def test_what_a_person_can_mend_is_one_sentence(source: Path, tmp_path: Path) -> None:
    for words in ((source, source, "--to", "torch"), (tmp_path / "none", tmp_path / "out", "--to", "torch")):
        _, _, _, error = ask(*words)
        assert isinstance(error, CheckpointError)
        assert error.exit_code == 2
        assert "\n" not in str(error)


def test_the_format_must_be_one_of_four(source: Path, tmp_path: Path) -> None:
    assert ask(source, tmp_path / "out", "--to", "onnx")[0] == 2
    assert ask(source, tmp_path / "out")[0] == 2
