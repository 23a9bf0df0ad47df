"""Are weights of a torch DCP folder found, read and, where they are damaged, refused?"""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from closeranks.checkpoint.weights.dcp_folder import open_dcp
from closeranks.checkpoint.weights.open import open_weights
from closeranks.core.errors import CheckpointError
from closeranks.core.pieces import Piece

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def model() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "layers.0.weight": torch.randn(6, 4, generator=generator),
        "turned": torch.randn(4, 3, generator=generator).t(),
        "half": torch.randn(3, generator=generator).bfloat16(),
        "count": torch.tensor(5),
        "none": torch.empty(0, 2),
    }


def save(folder: Path, state: Any) -> Path:
    dcp.save(state, checkpoint_id=folder)
    return folder


MEMORY = {"state": {"layers.0.weight": {"exp_avg": torch.ones(6, 4)}}, "param_groups": [{"lr": 0.1}]}


@pytest.mark.parametrize(
    ("state", "prefix"),
    [
        (model(), None),
        ({"model": model()}, None),
        ({"model": model(), "optimizer": MEMORY, "epoch": 3, "rng": torch.get_rng_state()}, None),
        ({"app": {"model": model(), "optim": MEMORY}}, None),
        ({"state_dict": {"model": model()}, "optimizer": MEMORY}, None),
        ({"state_dict": model(), "optimizer_states": MEMORY}, None),
        ({**model(), "optimizer": MEMORY}, None),
        ({"student": model(), "teacher": {"x": torch.ones(1)}}, ["student"]),
        ({"model": {"a": torch.ones(1)}, **model()}, []),
    ],
)
def test_the_model_is_found_where_people_keep_it(tmp_path: Path, state: Any, prefix: list[str] | None) -> None:
    weights = open_dcp(save(tmp_path / "x", state), prefix)
    expected = model() if prefix != [] else {**model(), "model.a": torch.ones(1)}
    assert dict(weights.names()) == {name: tuple(value.shape) for name, value in expected.items()}
    for name, value in expected.items():
        found = weights.read(name, Piece.whole("any", tuple(value.shape)))
        assert found.dtype == value.dtype == weights.dtype(name)
        assert torch.equal(found, value)


def test_names_of_hugging_face_keep_their_own_model(tmp_path: Path) -> None:
    """``model.`` belongs to the names here: the state dict that was saved is the model's own."""
    weights = {"model.embed.weight": torch.ones(2), "model.norm.weight": torch.ones(3)}
    assert open_dcp(save(tmp_path / "x", weights)).names().keys() == weights.keys()


def test_wrappers_are_no_part_of_a_name(tmp_path: Path) -> None:
    weights = {"model": {"_orig_mod.layers.0._checkpoint_wrapped_module.w": torch.ones(2)}}
    assert list(open_dcp(save(tmp_path / "x", weights)).names()) == ["layers.0.w"]
    twice = {"model": {"_orig_mod.w": torch.ones(2), "w": torch.ones(2)}}
    with pytest.raises(CheckpointError, match="duplicate tensor names"):
        open_dcp(save(tmp_path / "y", twice))


def test_it_is_one_of_the_kinds_that_a_run_starts_from(tmp_path: Path) -> None:
    assert open_weights(str(save(tmp_path / "x", {"model": model()}))).names().keys() == model().keys()


def test_what_is_asked_for_must_be_there(tmp_path: Path) -> None:
    weights = open_dcp(save(tmp_path / "x", {"model": model()}))
    with pytest.raises(CheckpointError, match="has no tensor 'other'"):
        weights.dtype("other")
    with pytest.raises(CheckpointError, match=r"'half' has the shape \[3\], not \[4\]"):
        weights.read("half", Piece.whole("half", (4,)))
    with pytest.raises(CheckpointError, match=r"holds no model under 'a\.b'. It holds model"):
        open_dcp(tmp_path / "x", ["a", "b"])
    with pytest.raises(CheckpointError, match=r"there is no \.metadata in it"):
        open_dcp(tmp_path)


def test_a_hostile_folder_runs_nothing(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.system, (f"touch {tmp_path / 'mark'}",)

    folder = save(tmp_path / "x", {"model": model()})
    (folder / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError, match=r"asks for 'posix\.system'"):
        open_dcp(folder)
    assert not (tmp_path / "mark").exists()


def test_a_hostile_chunk_runs_nothing(tmp_path: Path) -> None:
    """The metadata is sound, a chunk is a pickle with a call in it."""

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.system, (f"touch {tmp_path / 'mark'}",)

    folder = save(tmp_path / "x", {"w": torch.ones(500)})
    file = folder / "__0_0.distcp"
    size = file.stat().st_size
    torch.save(Evil(), file)
    data = file.read_bytes()
    assert len(data) < size
    file.write_bytes(data[:-22] + data[-22:-2] + (size - len(data)).to_bytes(2, "little") + bytes(size - len(data)))
    with pytest.raises(CheckpointError, match=r"'w' in __0_0\.distcp is damaged"):
        open_dcp(folder).read("w", Piece.whole("w", (500,)))
    assert not (tmp_path / "mark").exists()


def test_a_flipped_bit_is_refused_where_torch_would_load_it(tmp_path: Path) -> None:
    value = torch.randn(100)
    folder = save(tmp_path / "x", {"w": value})
    file = folder / "__0_0.distcp"
    whole = file.read_bytes()
    place = whole.index(value.numpy().tobytes()) + 201
    file.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
    found = {"w": torch.zeros(100)}
    dcp.load(found, checkpoint_id=folder)
    assert not torch.equal(found["w"], value)  # torch's own reader takes it
    with pytest.raises(CheckpointError, match=r"'w' in __0_0\.distcp is damaged"):
        open_dcp(folder).read("w", Piece.whole("w", (100,)))


def test_every_flip_within_a_chunk_is_refused_or_harmless(tmp_path: Path) -> None:
    value = torch.randn(16)
    folder = save(tmp_path / "x", {"w": value})
    file = folder / "__0_0.distcp"
    whole = file.read_bytes()
    refused = 0
    for place in range(0, len(whole), 7):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ (1 << place % 8)]) + whole[place + 1 :])
        try:
            assert torch.equal(open_dcp(folder).read("w", Piece.whole("w", (16,))), value)
        except CheckpointError:
            refused += 1
    assert refused > 20


def test_a_file_that_is_cut_short_or_gone_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path / "x", {"w": torch.randn(100)})
    file = folder / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"'w' in __0_0\.distcp is damaged: .*truncated"):
        open_dcp(folder).read("w", Piece.whole("w", (100,)))
    file.unlink()
    with pytest.raises(CheckpointError, match=r"'w' in __0_0\.distcp is damaged"):
        open_dcp(folder).read("w", Piece.whole("w", (100,)))


def test_chunks_without_checksums_are_read_with_a_word(tmp_path: Path) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        folder = save(tmp_path / "x", {"w": torch.ones(3)})
    finally:
        torch.serialization.set_crc32_options(before)
    weights = open_dcp(folder)
    assert weights.notes == ()
    assert torch.equal(weights.read("w", Piece.whole("w", (3,))), torch.ones(3))
    assert "saved without checksums" in weights.notes[0]


def test_a_chunk_that_is_another_tensor_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path / "x", {"w": torch.ones(4)})
    other = save(tmp_path / "y", {"w": torch.ones(2, 2)})
    (folder / "__0_0.distcp").write_bytes((other / "__0_0.distcp").read_bytes())
    with pytest.raises(CheckpointError, match="not the tensor that the metadata describes"):
        open_dcp(folder).read("w", Piece.whole("w", (4,)))
