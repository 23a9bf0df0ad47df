"""``closeranks ckpt import-hf`` as a person meets it: what it says, what it leaves, and how it refuses."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from closeranks.facts.shapes.llama import LlamaShape, parameter_shapes
from closeranks.models.llama.hf_conversion import hf_config
from tests.cli.ckpt.calling import ckpt

SHAPE = LlamaShape(32, 2, 4, 2, 48, 260)


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(hf_config(SHAPE, max_len=64, dtype="float32")))
    draw = torch.Generator().manual_seed(1)
    tensors = {name: torch.randn(shape, generator=draw) for name, shape in parameter_shapes(SHAPE).items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_it_makes_a_run_folder_and_says_what_is_next(hf: Path, tmp_path: Path) -> None:
    answer = ckpt("import-hf", hf, tmp_path / "run")
    assert answer.code == 0
    assert f"{hf} -> {tmp_path / 'run'}: 21 tensors, " in answer.out
    assert "run/job.toml" in answer.out
    assert answer.err == f"note: The tokenizer stays where it is, in {hf}.\n"  # and no bar, as this is no terminal
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["checkpoints", "job.toml"]


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        ("gone", "there is nothing at"),
        ("no config", "there is no config.json"),
        ("no weights", "holds no weights"),
        ("broken config", "is not JSON"),
        ("another architecture", "model_type = 'gpt2'"),
        ("another shape", "has shape"),
        ("cut short", "is damaged"),
        ("index alone", "is incomplete"),
        ("hostile index", "not in its folder"),
    ],
)
def test_a_bad_folder_is_one_sentence_and_exit_2(hf: Path, tmp_path: Path, harm: str, said: str) -> None:
    config, weights, index = hf / "config.json", hf / "model.safetensors", hf / "model.safetensors.index.json"
    table = json.loads(config.read_text())
    if harm == "gone":
        hf = hf.with_name("elsewhere")
    elif harm == "no config":
        config.unlink()
    elif harm == "no weights":
        weights.unlink()
    elif harm == "broken config":
        config.write_text(config.read_text()[:-20])
    elif harm == "another architecture":
        config.write_text(json.dumps({**table, "model_type": "gpt2"}))
    elif harm == "another shape":
        config.write_text(json.dumps({**table, "intermediate_size": 64}))
    elif harm == "cut short":
        os.truncate(weights, weights.stat().st_size - 4)
    else:
        weights.unlink()
        file = "model-00001-of-00002.safetensors" if harm == "index alone" else "../../secret.safetensors"
        index.write_text(json.dumps({"weight_map": {"x": file}}))
    answer = ckpt("import-hf", hf, tmp_path / "run")
    assert answer.code == 2
    assert answer.err.count("\n") == 1
    assert answer.err.startswith("closeranks: ")
    assert said in answer.err
    assert not (tmp_path / "run").exists()
    assert {path.name for path in tmp_path.iterdir()} <= {"hf"}


def test_what_is_there_is_not_overwritten(hf: Path, tmp_path: Path) -> None:
    assert ckpt("import-hf", hf, tmp_path / "run").code == 0
    before = (tmp_path / "run" / "job.toml").stat().st_mtime_ns
    answer = ckpt("import-hf", hf, tmp_path / "run")
    assert (answer.code, answer.out) == (2, "")
    assert "already exists and is not overwritten" in answer.err
    assert (tmp_path / "run" / "job.toml").stat().st_mtime_ns == before
