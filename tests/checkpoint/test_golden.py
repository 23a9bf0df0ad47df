"""A checkpoint of format version 1, written once: it must stay readable with exactly these values and digests.

Never write the files anew to make this pass. A change that needs other bytes is a new format version, with a golden
checkpoint of its own beside this one.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from closeranks.checkpoint.format.digests import blake3_hex
from closeranks.checkpoint.load.catalogue import find_checkpoints
from closeranks.checkpoint.load.resharding_reader import CheckpointReader, open_newest
from closeranks.checkpoint.load.verify import verify_all
from closeranks.core.pieces import Piece
from closeranks.storage.local import LocalStorage

GOLDEN = Path(__file__).parent / "golden"
FILES = {
    "latest": "1d040d81c9613570ac922dc5290c25ca3f52a2b5784ca491a46697f0bc9a063e",
    "step-00000002/data-00000-of-00002.safetensors": "4e72f388a57c188f9623730b6b8f640225d8c631c2a3f478665d7af09d5f2eaa",
    "step-00000002/data-00001-of-00002.safetensors": "74bb9adcdbb60efadbd8a3aaf1fee2beb3520ec25c83eba2a0f8d76eefcc0fe9",
    "step-00000002/manifest.json": "70325c938ff21656a22934c9706e56602ff2ab0ebfa2403403dec76fc8f9ea6c",
    "step-00000004/data-00000-of-00002.safetensors": "a7f880ae61249768525c4df5c35bb57b7b6236ee400075adc0c97c9f2a8f81c0",
    "step-00000004/data-00001-of-00002.safetensors": "45ff7459366eaf9e2f9f2b22650889dd8e305293733fdc3206a1f560faf08f3d",
    "step-00000004/manifest.json": "522189535f5ca2435e3c5141f285c86082591e76e869928ca3368c7f0e657ced",
}
DIGESTS = {
    ("model", "embed.weight"): 0x996C173340C217D0,
    ("model", "layers.0.weight"): 0x37F04FBF6147C000,
    ("model", "frozen"): 0x6F69181BD1805A00,
    ("model", "mask"): 0x729DC85D74D336BC,
    ("model", "empty"): 0,
    ("optimizer", "embed.weight/exp_avg"): 0xFBF8D352519AF75E,
    ("optimizer", "embed.weight/step"): 0xA08BD3F30FD736BC,
    ("other", "scaler/scale"): 0x9A91A0F426F8BE48,
    ("other", "freqs"): 0xD246C0C159600000,
}
VALUES = {
    ("model", "embed.weight"): (2 - torch.arange(35) / 8).reshape(7, 5).bfloat16(),
    ("model", "layers.0.weight"): (torch.arange(24.0) ** 2 / 16).reshape(4, 6),
    ("model", "frozen"): (torch.arange(9) / 4).half().reshape(3, 3),
    ("model", "mask"): torch.tensor([True, False, False, True, True]),
    ("model", "empty"): torch.zeros(0, 3),
    ("optimizer", "embed.weight/exp_avg"): torch.linspace(0, 1, 35, dtype=torch.float64).reshape(7, 5),
    ("optimizer", "embed.weight/step"): torch.tensor(4),
    ("other", "scaler/scale"): torch.tensor([1.0, 2.0, -1.0]).to(torch.float8_e4m3fn),
    ("other", "freqs"): torch.tensor([1 + 2j, -3.5j, 0.25]),
}
TREE = {
    "progress": {"step": 4, "position": 128},
    "identity": {"data": "golden", "vocab": "ä"},
    "metric": [0.1, 1e-300, None, True],
}


def test_the_files_are_the_ones_that_were_written() -> None:
    found = {str(path.relative_to(GOLDEN)): path for path in GOLDEN.rglob("*") if path.is_file()}
    assert {name: blake3_hex(path.read_bytes()) for name, path in found.items()} == FILES


def test_values_tree_and_digests() -> None:
    reader = open_newest(str(GOLDEN))
    manifest = reader.manifest
    assert (manifest.name, manifest.step, manifest.save) == ("step-00000004", 4, "5eed-4")
    assert (manifest.layout, manifest.num_ranks, manifest.metric) == ("data=2", 2, 1.25)
    assert (manifest.created, manifest.is_full) == (1_700_000_004.0, False)
    assert reader.tree == TREE
    assert manifest.digests() == DIGESTS
    for (section, key), expected in VALUES.items():
        got = reader.read(section, key, Piece.whole(key, tuple(expected.shape)))
        assert got.dtype is expected.dtype
        assert got.shape == expected.shape
        is_odd = got.dtype is torch.float8_e4m3fn
        assert torch.equal(got.float(), expected.float()) if is_odd else torch.allclose(got, expected, 0, 1e-15)


def test_it_is_sound_and_refers_to_the_one_before() -> None:
    catalogue = find_checkpoints(str(GOLDEN))
    assert [found.name for found in catalogue.candidates()] == ["step-00000004", "step-00000002"]
    assert catalogue.latest is catalogue.found[0]
    assert verify_all(catalogue) == []
    reader = CheckpointReader(LocalStorage(GOLDEN), "step-00000004")
    assert len(reader.manifest.referenced_files()) == 2
    kinds = [entry.chunk.piece.flat is None for entry in reader.manifest.entries]
    assert any(kinds)
    assert not all(kinds)


@pytest.mark.parametrize("rank", [0, 1])
def test_its_data_files_are_plain_safetensors(rank: int) -> None:
    path = GOLDEN / "step-00000002" / f"data-0000{rank}-of-00002.safetensors"
    with safe_open(path, framework="pt") as file:
        assert "model/layers.0.weight#0" in file.keys()  # noqa: SIM118 - it is no dict
        columns = slice(3 * rank, 3 * rank + 3)
        expected = VALUES["model", "layers.0.weight"][:, columns]
        assert torch.equal(file.get_tensor("model/layers.0.weight#0"), expected)
