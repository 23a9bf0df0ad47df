"""``closeranks ckpt export-hf`` as a person meets it: a trained run becomes a folder that transformers loads."""

from __future__ import annotations

import json
import os
import pty
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from closeranks.checkpoint.weights.hf_shards import NoProgress, plan_export
from closeranks.checkpoint.weights.open import open_weights
from closeranks.checkpoint.weights.save_weights import save_weights
from closeranks.checkpoint.weights.torch_file import TorchFile
from closeranks.cli.ckpt.transfer_progress import parse_size, size_text, transfer_bar
from closeranks.core.pieces import Piece
from closeranks.facts.shapes.llama import LlamaShape, parameter_shapes
from tests.cli.ckpt.calling import ckpt
from tests.cli.commands import FAST, TINY, closeranks

SHAPE = LlamaShape(32, 2, 4, 2, 48, 260, tied=True)
TABLE = {"name": "llama", "dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 48}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("runs") / "small"
    draw = torch.Generator().manual_seed(1)
    tensors = {name: torch.randn(shape, generator=draw) for name, shape in parameter_shapes(SHAPE).items()}
    weights = TorchFile("memory", tensors, ())
    tree = {"config": {"model": {**TABLE, "vocab_size": 260, "tied": True}, "data": {"seq_len": 64}}}
    save_weights(
        str(place / "checkpoints"), weights, plan_export(weights, {name: name for name in tensors}), tree, NoProgress()
    )
    return place


def test_it_writes_files_of_the_size_asked_for_and_says_so(run: Path, tmp_path: Path) -> None:
    answer = ckpt("export-hf", run, tmp_path / "hf", "--dtype", "bfloat16", "--shard-size", "20KB")
    assert answer.code == 0
    assert f"step-00000000 -> {tmp_path / 'hf'}: 20 tensors, 47.7 kB in 3 files." in answer.out
    assert "from_pretrained" in answer.out
    assert answer.err.startswith("note: No tokenizer is written")
    files = sorted(path.name for path in (tmp_path / "hf").iterdir())
    assert files == [
        "config.json",
        *[f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)],
        "model.safetensors.index.json",
    ]
    weights, expected = open_weights(str(tmp_path / "hf")), open_weights(str(run))
    for name, shape in expected.names().items():
        piece = Piece.whole(name, tuple(shape))
        assert torch.equal(weights.read(name, piece), expected.read(name, piece).bfloat16())
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize("size", ["5", "GB", "0GB", "-1GB", "5 bananas", ""])
def test_a_size_that_is_none_is_refused(run: Path, tmp_path: Path, size: str) -> None:
    answer = ckpt("export-hf", run, tmp_path / "hf", f"--shard-size={size}")
    assert answer.code == 2
    assert "Write it like 5GB" in answer.err
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize(
    ("text", "num_bytes"), [("5GB", 5 * 10**9), ("1.5 MB", 1_500_000), ("2GiB", 2 << 30), ("7b", 7), (" 1kb ", 1000)]
)
def test_sizes(text: str, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


def test_sizes_in_words() -> None:
    assert [size_text(n) for n in (0, 999, 1500, 5 * 10**9)] == ["0 B", "999 B", "1.5 kB", "5.0 GB"]


def test_a_place_without_a_checkpoint_is_one_sentence_and_exit_2(tmp_path: Path) -> None:
    answer = ckpt("export-hf", tmp_path, tmp_path / "hf")
    assert answer.code == 2
    assert answer.err.count("\n") == 1
    assert "checkpoint" in answer.err
    assert not (tmp_path / "hf").exists()


def test_what_is_there_is_not_overwritten(run: Path, tmp_path: Path) -> None:
    (tmp_path / "hf").write_text("mine")
    answer = ckpt("export-hf", run, tmp_path / "hf")
    assert answer.code == 2
    assert "already exists and is not overwritten" in answer.err
    assert (tmp_path / "hf").read_text() == "mine"


def test_a_url_is_not_made_a_folder(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for words in (("export-hf", run), ("import-hf", run), ("convert", run, "--to", "torch")):
        answer = ckpt(*words, "s3://bucket/out")
        assert answer.code == 2
        assert "s3://bucket/out is not a local path" in answer.err
    assert list(tmp_path.iterdir()) == []


def test_a_bar_is_drawn_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with os.fdopen(theirs, "w") as terminal, monkeypatch.context() as there:
        there.setattr(sys, "stderr", terminal)
        with transfer_bar() as watcher:
            watcher.begin("writing", 2000)
            watcher.advance(500)
            watcher.advance(1500)
    drawn = b""
    with os.fdopen(ours, "rb", buffering=0) as screen, suppress(OSError):  # how a terminal says that all has come
        while more := screen.read(1 << 16):
            drawn += more
    assert b"writing" in drawn
    assert b"2.0/2.0 kB" in drawn


def test_no_bar_is_drawn_into_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as log:
        monkeypatch.setattr(sys, "stderr", log)
        with transfer_bar() as watcher:
            watcher.begin("writing", 2000)
            watcher.advance(2000)
    assert (tmp_path / "log").read_text() == ""


@pytest.mark.slow
@pytest.mark.world
def test_a_trained_run_becomes_a_folder_and_its_weights_start_another(tmp_path: Path) -> None:
    """The whole way by the command line alone: train, export, and train on from what was exported."""
    trained = closeranks("train", TINY, "-n", "2", *FAST, "layout.zero=3", "run.folder=first", cwd=tmp_path)
    assert trained.code == 0, trained.err
    exported = closeranks("ckpt", "export-hf", "first", "hf", cwd=tmp_path)
    assert exported.code == 0, exported.err
    further = closeranks("train", TINY, *FAST, "checkpoint.weights=hf", "run.folder=second", cwd=tmp_path)
    assert further.code == 0, further.err
    assert (tmp_path / "second" / "checkpoints" / "latest").is_file()
