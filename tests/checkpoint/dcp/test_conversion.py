"""Do weights arrive unchanged in every format, from every format, and is nothing ever half there?"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from closeranks.checkpoint.dcp.conversion import FORMATS, convert
from closeranks.checkpoint.dcp.storage_writer import CheckpointStorageWriter
from closeranks.checkpoint.load.resharding_reader import open_newest
from closeranks.checkpoint.weights.open import open_weights
from closeranks.core.errors import CheckpointError, UserError
from closeranks.core.pieces import Piece
from tests.checkpoint.making import a_state, by_ranges, write

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

OUT = {"closeranks": "out", "dcp": "out", "torch": "out.pt", "safetensors": "out.safetensors"}


def model() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "layers.0.weight": torch.randn(6, 4, generator=generator),
        "turned": torch.randn(4, 3, generator=generator).t().contiguous(),
        "half": torch.randn(3, generator=generator).bfloat16(),
        "count": torch.tensor(5),
        "flags": torch.tensor([True, False]),
        "none": torch.empty(0, 2),
    }


MEMORY = {
    "state": {"layers.0.weight": {"exp_avg": torch.full((6, 4), 2.0), "step": torch.tensor(7.0)}},
    "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": ["layers.0.weight"]}],
}


def make(kind: str, folder: Path) -> Path:
    folder.mkdir()
    if kind == "torch":
        torch.save(model(), folder / "in.pt")
        return folder / "in.pt"
    if kind == "safetensors":
        save_file(model(), folder / "in.safetensors")
        return folder / "in.safetensors"
    state = {"model": model(), "optimizer": MEMORY, "epoch": 2}
    if kind == "dcp":
        dcp.save(state, checkpoint_id=folder)
    else:
        dcp.save(state, storage_writer=CheckpointStorageWriter(folder / "checkpoints", 4))
    return folder


def run(source: Path, out: Path, to: str) -> tuple[list[int], list[int]]:
    totals: list[int] = []
    done: list[int] = []
    convert(str(source), out, to, totals.append, done.append)
    return totals, done


def check_model(place: Path) -> None:
    weights = open_weights(str(place))
    assert weights.names().keys() == model().keys()
    for name, value in model().items():
        found = weights.read(name, Piece.whole(name, tuple(value.shape)))
        assert found.dtype == value.dtype
        assert torch.equal(found, value), name


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("kind", FORMATS)
def test_weights_arrive_unchanged(tmp_path: Path, kind: str, to: str) -> None:
    out = tmp_path / OUT[to]
    totals, done = run(make(kind, tmp_path / "in"), out, to)
    check_model(out)
    assert len(totals) == 1
    assert sum(done) <= totals[0]
    assert sum(done) > 0.9 * totals[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["in", out.name])  # nothing is left aside


def test_other_programs_open_them(tmp_path: Path) -> None:
    source = make("closeranks", tmp_path / "in")
    for to in ("torch", "safetensors"):
        run(source, tmp_path / OUT[to], to)
    for found in (torch.load(tmp_path / "out.pt", weights_only=True), load_file(tmp_path / "out.safetensors")):
        assert found.keys() == model().keys()
        assert all(torch.equal(found[name], value) for name, value in model().items())


def test_the_optimizer_goes_along_to_dcp(tmp_path: Path) -> None:
    run(make("closeranks", tmp_path / "in"), tmp_path / "out", "dcp")
    found: dict[str, Any] = {
        "model": {name: torch.zeros_like(value) for name, value in model().items()},
        "optimizer": {
            "state": {"layers.0.weight": {"exp_avg": torch.zeros(6, 4), "step": torch.tensor(0.0)}},
            "param_groups": [{"lr": 0.0, "betas": (), "params": []}],
        },
        "epoch": 0,
    }
    dcp.load(found, checkpoint_id=tmp_path / "out")
    assert all(torch.equal(found["model"][name], value) for name, value in model().items())
    memory = found["optimizer"]
    assert torch.equal(memory["state"]["layers.0.weight"]["exp_avg"], torch.full((6, 4), 2.0))
    assert (memory["param_groups"], found["epoch"]) == (MEMORY["param_groups"], 2)
    dcp_to_torch_save(tmp_path / "out", tmp_path / "all.pt")
    nested = torch.load(tmp_path / "all.pt", weights_only=True)
    assert torch.equal(nested["model"]["half"], model()["half"])


def test_a_checkpoint_of_training_goes_to_dcp_with_its_optimizer(tmp_path: Path) -> None:
    saved = a_state()
    write(tmp_path / "run/checkpoints", 3, saved, cut=by_ranges, num_ranks=3)
    run(tmp_path / "run", tmp_path / "out", "dcp")
    found = {"optimizer": {"state": {"embed.weight": {"exp_avg": torch.zeros(7, 6, dtype=torch.float64)}}}}
    dcp.load(found, checkpoint_id=tmp_path / "out")
    memory = found["optimizer"]["state"]["embed.weight"]["exp_avg"]
    assert memory.numpy().tobytes() == saved["optimizer", "embed.weight/exp_avg"].values.tobytes()


def test_a_converted_checkpoint_says_that_it_holds_weights_alone(tmp_path: Path) -> None:
    run(make("dcp", tmp_path / "in"), tmp_path / "out", "closeranks")
    reader = open_newest(str(tmp_path / "out"))
    assert reader.tree["weights_only"] is True
    assert reader.tree["source"] == str(tmp_path / "in")
    assert reader.shapes("optimizer") == {}
    assert reader.manifest.step == 0


def test_a_round_trip_keeps_every_digest(tmp_path: Path) -> None:
    run(make("torch", tmp_path / "in"), tmp_path / "a", "closeranks")
    for source, out, to in (
        ("a", "b", "dcp"),
        ("b", "c.safetensors", "safetensors"),
        ("c.safetensors", "d", "closeranks"),
    ):
        run(tmp_path / source, tmp_path / out, to)
    assert open_newest(str(tmp_path / "a")).manifest.digests() == open_newest(str(tmp_path / "d")).manifest.digests()


def test_large_tensors_go_band_by_band(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("closeranks.checkpoint.dcp.planner._BAND_BYTES", 64)
    source = make("torch", tmp_path / "in")
    largest = 0

    def watch(num_bytes: int) -> None:
        nonlocal largest
        largest = max(largest, num_bytes)

    convert(str(source), tmp_path / "out", "dcp", lambda total: None, watch)
    assert 0 < largest <= 64
    check_model(tmp_path / "out")
    found = {"model": {"layers.0.weight": torch.zeros(6, 4)}}
    dcp.load(found, checkpoint_id=tmp_path / "out")
    assert torch.equal(found["model"]["layers.0.weight"], model()["layers.0.weight"])


@pytest.mark.parametrize("to", FORMATS)
def test_nothing_is_written_over(tmp_path: Path, to: str) -> None:
    out = tmp_path / OUT[to]
    out.write_text("mine")
    with pytest.raises(CheckpointError, match="already exists"):
        run(make("torch", tmp_path / "in"), out, to)
    assert out.read_text() == "mine"


@pytest.mark.parametrize("to", FORMATS)
def test_a_source_that_is_damaged_leaves_nothing(tmp_path: Path, to: str) -> None:
    source = make("closeranks", tmp_path / "in")
    data = next(source.rglob("*.safetensors"))
    octets = bytearray(data.read_bytes())
    octets[octets.index(model()["layers.0.weight"].numpy().tobytes()) + 5] ^= 8
    data.write_bytes(octets)
    with pytest.raises(CheckpointError, match="does not match its digest"):
        run(source, tmp_path / OUT[to], to)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a small disk")
@pytest.mark.parametrize("to", FORMATS)
def test_a_full_disk_is_one_sentence_and_leaves_nothing(tmp_path: Path, to: str) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    torch.save({"w": torch.ones(1 << 20)}, tmp_path / "in.pt")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], check=True)
    try:
        with pytest.raises(UserError, match=r"(?i)space|full|cannot be written") as told:
            run(tmp_path / "in.pt", disk / OUT[to], to)
        assert "\n" not in str(told.value)
        assert list(disk.iterdir()) == []
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def test_a_url_to_write_to_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a local path"):
        run(make("torch", tmp_path / "in"), Path("s3://bucket/x"), "dcp")


def test_what_safetensors_has_no_word_for_is_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2, dtype=torch.complex128)}, tmp_path / "in.pt")
    with pytest.raises(CheckpointError, match=r"'w' is of torch\.complex128"):
        run(tmp_path / "in.pt", tmp_path / "out.safetensors", "safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["in.pt"]
