"""A state in pieces: any layout to any layout, whole or refused."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from closeranks.checkpoint.pieces import FOLDER_NAME, Item, PieceReader, is_pieces, save_pieces
from closeranks.checkpoint.single import FILE_NAME, load_tree, save_tree
from closeranks.core.errors import CheckpointError, SetupError
from closeranks.core.pieces import Piece
from closeranks.testing import run_world

from .cutting import cuts, shapes

WHOLE = torch.arange(24.0).reshape(4, 6)
TREE: dict[str, Any] = {"progress": {"step": 3}, "loss_scale": {"scale": torch.tensor(8.0)}, "config": {"a": [1, None]}}


def cut_out(whole: Tensor, piece: Piece) -> Tensor:
    box = whole[tuple(slice(start, start + size) for start, size in zip(piece.start, piece.size, strict=True))]
    return box if piece.flat is None else box.reshape(-1)[slice(*piece.flat)]


def item(piece: Piece, whole: Tensor = WHOLE, section: str = "model", key: str = "a.weight") -> Item:
    return section, key, piece, cut_out(whole, piece)


_numbers = count()


def one_name() -> Any:
    """What ranks that are played one after another agree on."""
    name = f"{next(_numbers):08x}"
    return lambda: name


def save_all(folder: Path, pieces: Sequence[Piece], whole: Tensor = WHOLE, tree: Any = None) -> list[int]:
    """One piece a rank."""
    tree, name = TREE if tree is None else tree, one_name()
    ranks = reversed(list(enumerate(pieces)))  # rank 0 removes what was there before once all have written
    sizes = [save_pieces(folder, rank, len(pieces), [item(p, whole)], tree, draw_name=name) for rank, p in ranks]
    return sizes[::-1]


def rows(parts: int) -> list[Piece]:
    return [Piece.whole("a.weight", (4, 6)).cut(0, index, parts) for index in range(parts)]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_saved_under_one_cut_read_under_another(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    with tempfile.TemporaryDirectory() as name:
        save_all(Path(name), data.draw(cuts(shape)), whole)
        reader = PieceReader(Path(name))
        assert reader.shapes("model") == {"a.weight": shape}
        for piece in data.draw(cuts(shape)):
            found = reader.read("model", "a.weight", piece)
            assert found.dtype == torch.bfloat16
            assert torch.equal(found, cut_out(whole, piece))


def test_each_rank_writes_one_file_and_rank_0_the_tree(tmp_path: Path) -> None:
    sizes = save_all(tmp_path, rows(3))
    names = sorted(os.listdir(tmp_path))
    assert [name.split("-", 2)[2] for name in names] == [f"0000{rank}-of-00003.safetensors" for rank in range(3)]
    assert [(tmp_path / name).stat().st_size for name in names] == sizes
    tree = PieceReader(tmp_path).tree
    assert tree.keys() == TREE.keys()
    assert tree["progress"] == {"step": 3}
    assert torch.equal(tree["loss_scale"]["scale"], torch.tensor(8.0))


def test_a_run_folder_leads_to_it_and_load_tree_makes_it_whole(tmp_path: Path) -> None:
    save_all(tmp_path / FOLDER_NAME, rows(2))
    assert is_pieces(tmp_path)
    assert is_pieces(tmp_path / FOLDER_NAME)
    tree = load_tree(tmp_path)
    assert torch.equal(tree["model"]["a.weight"], WHOLE)
    assert tree["config"] == {"a": [1, None]}


def test_only_one_form_stands_in_a_run_folder(tmp_path: Path) -> None:
    assert not is_pieces(tmp_path)
    save_tree({"model": {}}, tmp_path / FILE_NAME)
    assert not is_pieces(tmp_path)
    assert not is_pieces(tmp_path / FILE_NAME)
    save_all(tmp_path / FOLDER_NAME, rows(2))
    assert os.listdir(tmp_path) == [FOLDER_NAME]
    save_tree({"model": {}}, tmp_path / FILE_NAME)
    assert os.listdir(tmp_path) == [FILE_NAME]


def test_what_is_not_ours_or_not_beside_a_save_stays(tmp_path: Path) -> None:
    save_tree({"model": {}}, tmp_path / FILE_NAME)
    save_all(tmp_path / "copy", rows(2))
    save_all(tmp_path / "other" / FOLDER_NAME, rows(2))
    assert (tmp_path / FILE_NAME).exists()
    (tmp_path / "other" / FOLDER_NAME / "notes.txt").write_text("mine")
    save_tree({"model": {}}, tmp_path / "other" / "aside.safetensors")
    assert len(os.listdir(tmp_path / "other" / FOLDER_NAME)) == 3
    save_tree({"model": {}}, tmp_path / "other" / FILE_NAME)
    assert os.listdir(tmp_path / "other" / FOLDER_NAME) == ["notes.txt"]
    assert len(os.listdir(tmp_path / "copy")) == 2


def test_where_both_forms_stand_the_later_that_is_complete_counts(tmp_path: Path) -> None:
    save_all(tmp_path / FOLDER_NAME, rows(2))
    save_tree({"model": {}}, tmp_path / "elsewhere" / FILE_NAME)
    (tmp_path / "elsewhere" / FILE_NAME).rename(tmp_path / FILE_NAME)
    os.utime(tmp_path / FILE_NAME, ns=(1, 1))
    assert is_pieces(tmp_path)
    files = sorted((tmp_path / FOLDER_NAME).iterdir())
    for path in files:
        os.utime(path, ns=(0, 0))
    assert not is_pieces(tmp_path)
    os.utime(files[0])
    files[1].unlink()
    assert not is_pieces(tmp_path), "a part of a save is none"


def test_a_save_that_rank_0_cannot_see_whole_removes_nothing(tmp_path: Path) -> None:
    save_all(tmp_path, rows(2))
    later = {**TREE, "progress": {"step": 4}}
    for rank in (1, 0):  # each under a name of its own
        save_pieces(tmp_path, rank, 2, [item(rows(2)[rank], WHOLE + 1)], later)
    assert PieceReader(tmp_path).tree["progress"] == {"step": 3}
    assert torch.equal(load_tree(tmp_path)["model"]["a.weight"], WHOLE)


def test_a_second_save_of_the_same_step_writes_over_nothing(tmp_path: Path) -> None:
    save_pieces(tmp_path, 0, 1, [item(rows(1)[0])], TREE)
    before = os.listdir(tmp_path)
    torch.manual_seed(0)
    with pytest.raises(SetupError, match="another worker"):
        save_pieces(tmp_path, 0, 1, [item(rows(1)[0], WHOLE + 1)], TREE, everywhere=lambda is_well: False)
    assert len(os.listdir(tmp_path)) == 2
    save_pieces(tmp_path, 0, 1, [item(rows(1)[0], WHOLE + 2)], TREE)
    assert len(os.listdir(tmp_path)) == 1
    assert os.listdir(tmp_path) != before
    assert torch.equal(load_tree(tmp_path)["model"]["a.weight"], WHOLE + 2)


def test_counters_that_share_memory_and_slices_of_one_buffer_are_saved(tmp_path: Path) -> None:
    step, flat = torch.tensor(7), torch.arange(10.0)
    slices = [Piece.whole("a", (6,)), Piece.whole("b", (4,))]
    items: list[Item] = [
        ("optimizer", "a/m", slices[0], flat[:6]),
        ("optimizer", "b/m", slices[1], flat[6:]),
        ("optimizer", "a/step", Piece.whole("a/step", ()), step),
        ("optimizer", "b/step", Piece.whole("b/step", ()), step),
    ]
    save_pieces(tmp_path, 0, 1, items, {})
    reader = PieceReader(tmp_path)
    assert torch.equal(reader.read("optimizer", "b/m", slices[1]), flat[6:])
    assert int(reader.read("optimizer", "b/step", Piece.whole("b/step", ()))) == 7
    assert reader.read("optimizer", "a/m", slices[0], torch.float64).dtype == torch.float64


def test_a_hole_is_refused_by_name(tmp_path: Path) -> None:
    first, _, third, _ = rows(4)
    save_all(tmp_path, [first, third])
    reader = PieceReader(tmp_path)
    assert torch.equal(reader.read("model", "a.weight", first), WHOLE[:1])
    with pytest.raises(CheckpointError, match=r"not whole: of 'model/a.weight' the elements from \(1, 0\)"):
        reader.read("model", "a.weight", Piece.whole("a.weight", (4, 6)))


def test_what_is_not_there_or_has_another_shape_is_refused(tmp_path: Path) -> None:
    save_all(tmp_path, rows(2))
    with pytest.raises(CheckpointError, match=r"has no 'model/b\.weight'"):
        PieceReader(tmp_path).read("model", "b.weight", Piece.whole("b.weight", (1,)))
    with pytest.raises(CheckpointError, match=r"shape \(6, 4\) here and \(4, 6\)"):
        PieceReader(tmp_path).read("model", "a.weight", Piece.whole("a.weight", (6, 4)))
    with pytest.raises(CheckpointError, match="no state in pieces"):
        PieceReader(tmp_path / "nowhere")


def test_a_torn_save_is_refused(tmp_path: Path) -> None:
    save_all(tmp_path, rows(3))
    next(path for path in tmp_path.iterdir() if "-00001-of-" in path.name).unlink()
    with pytest.raises(CheckpointError, match="part of rank 1 of 3 is missing"):
        PieceReader(tmp_path)


def test_a_save_that_was_cut_short_leaves_the_one_before(tmp_path: Path) -> None:
    save_all(tmp_path, rows(3))
    later, name = {**TREE, "progress": {"step": 4}}, one_name()
    for rank in (1, 2):
        save_pieces(tmp_path, rank, 3, [item(rows(3)[rank], WHOLE + 1)], later, draw_name=name)
    assert PieceReader(tmp_path).tree["progress"] == {"step": 3}
    save_pieces(tmp_path, 0, 3, [item(rows(3)[0], WHOLE + 1)], later, draw_name=name)
    assert PieceReader(tmp_path).tree["progress"] == {"step": 4}
    assert torch.equal(load_tree(tmp_path)["model"]["a.weight"], WHOLE + 1)
    assert len(os.listdir(tmp_path)) == 3, "the earlier files are gone"


def test_parts_of_two_saves_are_never_mixed(tmp_path: Path) -> None:
    save_all(tmp_path, rows(2))
    save_all(tmp_path / "other", rows(2), WHOLE + 1, {"progress": {"step": 4}})
    names = {path.name.split("-", 2)[2]: path for path in tmp_path.glob("*.safetensors")}
    foreign = next(path for path in (tmp_path / "other").iterdir() if "-00001-of-" in path.name)
    names["00001-of-00002.safetensors"].write_bytes(foreign.read_bytes())
    with pytest.raises(CheckpointError, match="was saved as"):
        PieceReader(tmp_path)


@pytest.mark.parametrize("place", [-1, -30, 300])
def test_a_flipped_bit_is_refused_where_it_is_read(tmp_path: Path, place: int) -> None:
    save_all(tmp_path, rows(2))
    path = next(path for path in tmp_path.iterdir() if "-00001-of-" in path.name)
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="damaged"):
        PieceReader(tmp_path).read("model", "a.weight", rows(2)[1])
    if place < 0:
        assert torch.equal(PieceReader(tmp_path).read("model", "a.weight", rows(2)[0]), WHOLE[:2])


def test_a_tensor_that_is_not_its_piece_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a piece of \(2, 6\)"):
        save_pieces(tmp_path, 0, 1, [("model", "a.weight", rows(2)[0], WHOLE)], {})


def save_with_one_failing(folder: Path, culprit: int) -> str:
    rank, size = dist.get_rank(), dist.get_world_size()
    save_pieces(folder, rank, size, [item(rows(size)[rank])], TREE)
    later = {**TREE, "progress": {"step": 4}}
    place = folder / "a file" if rank == culprit else folder
    (folder / "a file").touch()
    try:
        save_pieces(place, rank, size, [item(rows(size)[rank], WHOLE + 1)], later)
    except SetupError as error:
        return str(error)
    return "saved"


@pytest.mark.world
def test_where_one_rank_fails_all_say_so_and_the_state_before_still_counts(tmp_path: Path) -> None:
    words = run_world(save_with_one_failing, 3, tmp_path, 1)
    assert "could not be saved" in words[1]
    assert all("another worker could not save" in words[rank] for rank in (0, 2))
    assert PieceReader(tmp_path).tree["progress"] == {"step": 3}
    assert torch.equal(load_tree(tmp_path)["model"]["a.weight"], WHOLE)


def save_with_words_of_their_own(folder: Path) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for step in (3, 3):
        tree = {"progress": {"step": step}, "config": {"host": f"worker {rank}"}}
        save_pieces(folder, rank, size, [item(rows(size)[rank], WHOLE + step)], tree)


@pytest.mark.world
def test_ranks_whose_jobs_differ_write_one_save_and_rank_0_says_what_counts(tmp_path: Path) -> None:
    save_tree({"model": {}}, tmp_path / FILE_NAME)
    run_world(save_with_words_of_their_own, 2, tmp_path / FOLDER_NAME)
    assert len(os.listdir(tmp_path / FOLDER_NAME)) == 2
    tree = load_tree(tmp_path)
    assert torch.equal(tree["model"]["a.weight"], WHOLE + 3)
    assert tree["config"] == {"host": "worker 0"}
    assert not (tmp_path / FILE_NAME).exists()


def test_a_single_number_cut_out_of_a_column_is_saved(tmp_path: Path) -> None:
    """It counts as contiguous, with a stride that is not 1."""
    column = torch.arange(4, dtype=torch.bfloat16).view(2, 2)[:, 1:]
    pieces = [Piece("x", (2, 2), (0, 1), (2, 1), (first, first + 1)) for first in (0, 1)]
    values = [column.reshape(-1)[first : first + 1].as_strided((1,), (2,)) for first in (0, 1)]
    left = Piece("x", (2, 2), (0, 0), (2, 1))
    items = [("model", "x", left, torch.tensor([[0.0], [2.0]], dtype=torch.bfloat16))]
    items += [("model", "x", piece, value) for piece, value in zip(pieces, values, strict=True)]
    save_pieces(tmp_path, 0, 1, items, tree={})
    whole = PieceReader(tmp_path).read("model", "x", Piece.whole("x", (2, 2)))
    assert whole.tolist() == [[0.0, 1.0], [2.0, 3.0]]
