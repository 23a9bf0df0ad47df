"""Does torch's DCP carry a state through our format from any of its layouts to any other, exactly?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from closeranks.checkpoint.format.manifest import decode_latest
from closeranks.checkpoint.load.resharding_reader import CheckpointReader, open_newest
from closeranks.checkpoint.weights.dcp_folder import open_dcp
from closeranks.core.pieces import Piece
from closeranks.storage.local import LocalStorage
from closeranks.testing import run_world
from tests.checkpoint.dcp.worlds import Flat, load_into, load_plain, refused_save, save_all, save_asynchronously
from tests.checkpoint.making import Whole, by_ranges, filled, write

pytestmark = pytest.mark.world


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Flat]:
    folder = tmp_path_factory.mktemp("dcp")
    states = run_world(save_all, 4, str(folder))
    for other in states[1:]:
        check_equal(other, states[0])
    return folder, states[0]


def check_equal(found: Flat, expected: Flat) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert found[name].dtype == value.dtype, name
            assert torch.equal(found[name], value), name
        else:
            assert (found[name], type(found[name])) == (value, type(value)), name


@pytest.mark.parametrize(
    ("size", "layouts", "number"),
    [(4, ["dp4", "tp2dp2"], 1), (2, ["dp2", "tp2"], 1), (1, ["one"], 1), (1, ["one"], 2)],
)
def test_model_and_optimizer_load_in_any_layout(
    saved: tuple[Path, Flat], size: int, layouts: list[str], number: int
) -> None:
    """Number 1 was saved from TP2xDP2, number 2 from DP4."""
    folder, expected = saved
    model = {name: value for name, value in expected.items() if name.startswith("model.")}
    for found in run_world(load_into, size, layouts, str(folder / "ours" / f"step-0000000{number}")):
        for layout in layouts:
            loaded, after = found[layout]
            check_equal(loaded, expected)
            check_equal(after, model)


def test_the_digest_of_a_tensor_does_not_depend_on_the_mesh(saved: tuple[Path, Flat]) -> None:
    storage = LocalStorage(saved[0] / "ours")
    one, other = (CheckpointReader(storage, f"step-0000000{number}").manifest for number in (1, 2))
    assert one.digests() == other.digests()
    assert len(one.digests()) > 20
    pieces = [{entry.chunk.piece for entry in manifest.entries} for manifest in (one, other)]
    assert pieces[0] != pieces[1]  # they were cut differently


def test_every_rank_wrote_its_share_and_the_last_one_is_latest(saved: tuple[Path, Flat]) -> None:
    reader = open_newest(str(saved[0] / "ours"))
    assert reader.manifest.name == decode_latest((saved[0] / "ours/latest").read_bytes(), "latest").name
    assert (reader.manifest.num_ranks, len(reader.manifest.files), reader.manifest.is_full) == (4, 4, True)
    first = CheckpointReader(LocalStorage(saved[0] / "ours"), "step-00000001")
    assert (first.tree["who"], first.manifest.layout) == ("test", "tp2dp2")
    assert first.shapes("model")["up.weight"] == (12, 8)
    assert first.shapes("optimizer")["embed.weight/exp_avg"] == (7, 8)


def test_a_folder_of_torch_is_read_in_pieces(saved: tuple[Path, Flat]) -> None:
    """FSDP2 over four ranks saved it with torch's own writer."""
    folder, expected = saved
    weights = open_dcp(folder / "torch")
    assert weights.names().keys() == {name.removeprefix("model.") for name in expected if name.startswith("model.")}
    for name, shape in weights.names().items():
        value = expected[f"model.{name}"]
        whole = Piece.whole(name, shape)
        pieces = [whole, whole.flattened(0, whole.numel), whole.flattened(whole.numel // 3, whole.numel // 2)]
        pieces += [whole.shard(dim, index, 3) for dim in range(len(shape)) for index in range(3)]
        for piece in pieces:
            box = value[tuple(slice(a, a + n) for a, n in zip(piece.start, piece.size, strict=True))]
            part = box if piece.flat is None else box.reshape(-1)[slice(*piece.flat)]
            assert torch.equal(weights.read(name, piece), part)
    assert weights.read("up.weight", Piece.whole("", (12, 8)), torch.float64).dtype == torch.float64
    assert "do not belong to the model" in weights.notes[0]


def test_a_checkpoint_that_training_saved_loads_into_dtensors(tmp_path: Path) -> None:
    shapes = {"embed.weight": (7, 6), "head.weight": (5, 3, 2)}
    state = {("model", key): Whole("float32", filled(shape, "float32", 1)) for key, shape in shapes.items()}
    write(tmp_path / "checkpoints", 3, state, cut=by_ranges, num_ranks=3)
    names: dict[str, Any] = {f"model.{key}": shape for key, shape in shapes.items()}
    for found in run_world(load_plain, 4, names, str(tmp_path)):
        for key in shapes:
            assert found[f"model.{key}"].numpy().tobytes() == state["model", key].values.tobytes()


def test_a_value_of_one_rank_that_cannot_be_kept_fails_the_save_for_all(tmp_path: Path) -> None:
    for said in run_world(refused_save, 2, str(tmp_path)):
        assert "'odd1' holds a builtins.set, which is not pickled" in said
    assert not list(tmp_path.rglob("manifest.json"))


@pytest.mark.parametrize("kind", ["THREAD", pytest.param("PROCESS", marks=pytest.mark.slow)])
def test_async_save_of_dcp_on_two_ranks(tmp_path: Path, kind: str) -> None:
    assert run_world(save_asynchronously, 2, kind, str(tmp_path)) == [(True, 4)] * 2
