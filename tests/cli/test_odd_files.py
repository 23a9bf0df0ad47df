"""Verbs on folders in which a pipe, a socket, a device, a loop of links or a folder lies where a file is expected:
each answers with a sentence and an exit status, and none of them waits. (A test that hangs fails by its timeout.)"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.checkpoint import making
from tests.checkpoint.making import a_state
from tests.cli.calling import call
from tests.cli.ckpt.calling import ckpt
from tests.core.odd_files import KINDS, put

DATA = "data-00000-of-00002.safetensors"


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_of_checkpoints_is_listed_and_proven_around_them(kind: str, tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    for step in (20, 40, 60):
        making.write(root, step, a_state(step))
    put(kind, root / "step-00000060" / "manifest.json")
    put(kind, root / "step-00000040" / DATA)
    put(kind, root / "latest")
    put(kind, root / "stray")
    listed = json.loads(ckpt("ls", tmp_path, "--json").out)
    assert [row["state"] for row in listed["checkpoints"]] == ["damaged", "certified", "certified"]
    for verb in ("show", "verify", "diff"):
        said = ckpt(verb, root / "step-00000060", *([root / "step-00000020"] if verb == "diff" else []))
        assert said.code in (1, 2)
        assert "manifest.json" in said.out + said.err
    said = ckpt("verify", root / "step-00000040")
    assert said.code in (1, 2)
    assert DATA in said.out + said.err
    assert ckpt("verify", root / "step-00000020").code == 0
    (root / ".lock").unlink(missing_ok=True)
    put(kind, root / ".lock")
    said = ckpt("prune", tmp_path, "--keep-last", "2")
    assert (said.code, ".lock" in said.err) == (2, True), said


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_folder_is_told_around_them(kind: str, tmp_path: Path) -> None:
    (tmp_path / "metrics").mkdir()
    (tmp_path / "job.toml").write_text("")
    for name in ("status.json", "config.json"):
        put(kind, tmp_path / name)
    assert call("status", tmp_path).code == 0
    for name in ("rank-00000", "rank-00001", "agent"):
        path = tmp_path / "metrics" / f"{name}.jsonl"
        put(kind, path)
        for verb in ("status", "report"):
            said = call(verb, tmp_path)
            assert (said.code, f"{name}.jsonl cannot be read" in said.err) == (2, True), said
        path.rmdir() if kind == "folder" else path.unlink()


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_refused_by_name(kind: str, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    for name in ("model.safetensors", "weights.pt"):
        put(kind, tmp_path / name)
        said = ckpt("convert", tmp_path / name, tmp_path / "out", "--to", "safetensors")
        assert (said.code, str(tmp_path) in said.err) == (2, True), said
    put(kind, config)
    (tmp_path / "model.safetensors").rmdir() if kind == "folder" else (tmp_path / "model.safetensors").unlink()
    torch.save({"a": torch.zeros(2)}, tmp_path / "pytorch_model.bin")
    said = ckpt("import-hf", tmp_path, tmp_path / "ours")
    assert (said.code, "config.json" in said.err) == (2, True), said


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name", ["a.jsonl", "a.tar", "a.parquet", "a.npy", "a.bin", "a.arrow", "a.tfrecord", "index.json"]
)
def test_data_is_refused_by_name(kind: str, name: str, tmp_path: Path) -> None:
    np.save(tmp_path / "b.npy", np.zeros(4, np.int32))
    put(kind, tmp_path / name)
    if kind == "folder":
        (tmp_path / "b.npy").unlink()
    for verb, place in (("stats", tmp_path), ("verify", tmp_path / name)):
        said = call("data", verb, place)
        assert (said.code, str(tmp_path) in said.err) == (2, True), said


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["dataset.json", "shard"])
def test_shards_are_refused_by_name(kind: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some words\n" * 50)
    built = tmp_path / "built"
    assert call("data", "build", tmp_path / "a.txt", "--out", built).code == 0
    path = built / name if name != "shard" else next(one for one in built.iterdir() if one.name != "dataset.json")
    put(kind, path)
    for words in (["stats"], ["verify"], ["show", "0"]):
        said = call("data", *words, built)
        assert said.code in (1, 2), said
        assert path.name in said.out + said.err, said
