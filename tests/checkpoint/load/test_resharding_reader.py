"""Any piece of what was saved comes back exactly, and nothing else ever does."""

from __future__ import annotations

import tempfile
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from closeranks.checkpoint.format.manifest import ChunkLocation
from closeranks.checkpoint.load import resharding_reader
from closeranks.checkpoint.load.catalogue import find_checkpoints
from closeranks.checkpoint.load.chunk_reader import ChunkReader
from closeranks.checkpoint.load.resharding_reader import CheckpointReader, contiguous_offset, open_newest
from closeranks.checkpoint.load.verify import verify_all
from closeranks.core.errors import CheckpointError
from closeranks.core.pieces import Piece
from closeranks.core.reshard import plan_copies
from closeranks.storage.local import LocalStorage
from closeranks.storage.open import open_storage
from tests.checkpoint import making, saving
from tests.checkpoint.cutting import cuts, shapes
from tests.checkpoint.making import Whole, a_state, by_ranges, by_rows, filled, held

NAME = "step-00000040"


def opened(root: Path, name: str = NAME) -> CheckpointReader:
    return CheckpointReader(LocalStorage(root), name)


def octets(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def read_all(reader: CheckpointReader) -> dict[tuple[str, str], bytes]:
    return {
        (section, key): octets(reader.read(section, key, Piece.whole(key, shape)))
        for section in ("model", "optimizer", "other")
        for key, shape in reader.shapes(section).items()
    }


@pytest.mark.parametrize("cut", [by_rows, by_ranges])
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_every_tensor_comes_back_bit_for_bit(tmp_path: Path, cut: making.Cut, num_ranks: int) -> None:
    state = a_state()
    making.write(tmp_path, 40, state, cut=cut, num_ranks=num_ranks, tree={"progress": {"step": 40}})
    reader = opened(tmp_path)
    reader.check_files()
    assert read_all(reader) == {name: whole.values.tobytes() for name, whole in state.items()}
    assert reader.tree == {"progress": {"step": 40}}
    assert reader.path == str(tmp_path / NAME)
    assert reader.shapes("optimizer") == {"embed.weight/exp_avg": (7, 6), "embed.weight/step": ()}
    assert reader.dtype("model", "head.weight") is torch.bfloat16


@given(st.data(), shapes())
def test_any_piece_of_any_cut(data: st.DataObject, shape: tuple[int, ...]) -> None:
    saved, wanted = data.draw(cuts(shape)), data.draw(cuts(shape))
    values = filled(shape, "int32", 1)
    with tempfile.TemporaryDirectory() as folder:
        making.write(Path(folder), 40, {("model", "x"): Whole("int32", values)}, cut=lambda *_: [saved], num_ranks=1)
        reader = opened(Path(folder))
        for piece in wanted:
            got = reader.read("model", "x", piece)
            assert tuple(got.shape) == piece.local_shape
            assert octets(got) == held(values, piece)
            into = torch.full(piece.local_shape, 7, dtype=torch.int32)
            reader.read_into("model", "x", piece, into)
            assert torch.equal(into, got)


@given(st.data(), shapes())
def test_a_chunk_is_called_straight_only_where_it_lies_in_order(data: st.DataObject, shape: tuple[int, ...]) -> None:
    """Compared with copying the numbers of the elements themselves."""
    saved, wanted = data.draw(cuts(shape)), data.draw(st.sampled_from(data.draw(cuts(shape))))
    numbers = torch.arange(Piece.whole("x", shape).numel, dtype=torch.int32).numpy().reshape(shape)
    target = torch.frombuffer(bytearray(held(numbers, wanted) or bytes(4)), dtype=torch.int32).tolist()
    found = plan_copies(wanted, saved)
    for number, piece in enumerate(saved):
        overlaps = [overlap for overlap in found.overlaps if overlap.saved == number]
        place = contiguous_offset(overlaps, piece.numel)
        if place is not None and piece.numel:
            source = torch.frombuffer(bytearray(held(numbers, piece)), dtype=torch.int32).tolist()
            assert target[place : place + piece.numel] == source


@pytest.mark.parametrize("dim", [0, 1])
def test_large_tensors_by_several_threads(tmp_path: Path, dim: int) -> None:
    values = torch.arange(2_400_000, dtype=torch.int32).reshape(2_000, 1_200)
    making.write(tmp_path, 40, {("model", "x"): Whole("int32", values.numpy())}, cut=by_ranges)
    reader, whole = opened(tmp_path), Piece.whole("x", (2_000, 1_200))
    assert torch.equal(reader.read("model", "x", whole), values)
    assert torch.equal(reader.read("model", "x", whole, torch.float64), values.double())
    for index, part in enumerate(values.chunk(3, dim)):
        assert torch.equal(reader.read("model", "x", whole.shard(dim, index, 3)), part)


def test_whole_rows_are_read_straight_into_a_whole_tensor() -> None:
    whole = Piece.whole("x", (6, 4))
    found = plan_copies(whole, [whole.flattened(0, 9), whole.flattened(9, 24)])
    assert [contiguous_offset([o for o in found.overlaps if o.saved == n], size) for n, size in ((0, 9), (1, 15))] == [
        0,
        9,
    ]
    columns = plan_copies(whole, [whole.shard(1, 0, 2), whole.shard(1, 1, 2)])
    assert contiguous_offset([o for o in columns.overlaps if o.saved == 0], 12) is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_reading_into_another_type(tmp_path: Path, dtype: torch.dtype) -> None:
    values = torch.randn(8, 5)
    making.write(tmp_path, 40, {("model", "x"): Whole("float32", values.numpy())}, cut=by_ranges)
    piece = Piece.whole("x", (8, 5)).shard(1, 0, 2)
    got = opened(tmp_path).read("model", "x", piece, dtype)
    assert got.dtype is dtype
    assert torch.equal(got, values[:, :3].to(dtype))
    into = torch.zeros(8, 3, dtype=dtype)
    opened(tmp_path).read_into("model", "x", piece, into)
    assert torch.equal(into, got)


def test_reading_into_memory_with_gaps(tmp_path: Path) -> None:
    values = torch.randn(8, 5)
    making.write(tmp_path, 40, {("model", "x"): Whole("float32", values.numpy())})
    around = torch.zeros(8, 9)
    opened(tmp_path).read_into("model", "x", Piece.whole("x", (8, 5)), around[:, 2:7])
    assert torch.equal(around[:, 2:7], values)
    assert not around[:, :2].any()
    assert not around[:, 7:].any()


@pytest.mark.parametrize("name", sorted({"complex64", "complex128", "int16", "uint8", "float16", "uint32"}))
def test_every_other_type(tmp_path: Path, name: str) -> None:
    values = filled((6, 5), name, 3)
    making.write(tmp_path, 40, {("model", "x"): Whole(name, values)})
    got = opened(tmp_path).read("model", "x", Piece.whole("x", (6, 5)))
    assert got.dtype is getattr(torch, name)
    assert octets(got) == values.tobytes()


def test_neighbours_share_a_chunk_that_was_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[int] = []
    read_into = ChunkReader.read_into

    def counted(self: ChunkReader, entry: ChunkLocation, memory: memoryview) -> None:
        fetched.append(entry.offset)
        read_into(self, entry, memory)

    monkeypatch.setattr(ChunkReader, "read_into", counted)
    making.write(tmp_path, 40, {("model", "x"): Whole("int32", filled((8, 4), "int32", 0))}, num_ranks=1)
    reader = opened(tmp_path)
    for index in range(8):
        reader.read("model", "x", Piece.whole("x", (8, 4)).shard(0, index, 8))
    assert len(fetched) == 1
    monkeypatch.setattr(resharding_reader, "_KEPT_BYTES", 64)
    reader = opened(tmp_path)
    for index in range(2):
        reader.read("model", "x", Piece.whole("x", (8, 4)).shard(0, index, 8))
    assert len(fetched) == 3


def test_references_are_followed_and_their_loss_is_named(tmp_path: Path) -> None:
    base = making.write(tmp_path, 20, a_state())
    state = {**a_state(), ("model", "mask"): Whole("bool", filled((9,), "bool", 77))}
    manifest = making.write(tmp_path, 40, state, base=base)
    assert not manifest.is_full
    assert manifest.own_bytes < base.own_bytes
    reader = opened(tmp_path)
    assert read_all(reader) == {name: whole.values.tobytes() for name, whole in state.items()}
    (tmp_path / "step-00000020" / "data-00001-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"step-00000040 is damaged.*step-00000020/data-00001.*is missing"):
        opened(tmp_path).check_files()
    with pytest.raises(CheckpointError, match="is missing"):
        read_all(opened(tmp_path))


def data_file(root: Path, name: str = NAME) -> Path:
    return root / name / "data-00000-of-00002.safetensors"


def test_a_flipped_bit_of_a_tensor_is_refused_by_name(tmp_path: Path) -> None:
    manifest = making.write(tmp_path, 40, a_state())
    entry = next(one for one in manifest.entries if one.chunk.key == "embed.weight")
    data = bytearray(data_file(tmp_path).read_bytes())
    data[entry.offset + 5] ^= 4
    data_file(tmp_path).write_bytes(data)
    reader = opened(tmp_path)
    words = rf"step-00000040 is damaged: 'model/embed.weight' .* digest in {NAME}/data-00000.*from byte {entry.offset}"
    for piece in (Piece.whole("x", (7, 6)), Piece.whole("x", (7, 6)).shard(1, 0, 3)):
        with pytest.raises(CheckpointError, match=words):
            reader.read("model", "embed.weight", piece)
    reader.read("model", "mask", Piece.whole("x", (9,)))


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda path: path.unlink(), "data-00000.*is missing"),
        (lambda path: path.write_bytes(path.read_bytes()[:-3]), "has .* bytes and was saved with"),
        (lambda path: path.write_bytes(path.read_bytes() + b"x"), "has .* bytes and was saved with"),
        (lambda path: path.write_bytes(b"\1" + path.read_bytes()[1:]), "the header of data-00000.* its digest"),
    ],
)
def test_files_that_are_not_as_saved(tmp_path: Path, harm: Any, words: str) -> None:
    making.write(tmp_path, 40, a_state())
    harm(data_file(tmp_path))
    with pytest.raises(CheckpointError, match=words):
        opened(tmp_path).check_files()
    with pytest.raises(CheckpointError, match=words):
        read_all(opened(tmp_path))


def test_what_is_not_there_and_what_does_not_fit(tmp_path: Path) -> None:
    making.write(tmp_path, 40, a_state())
    reader = opened(tmp_path)
    with pytest.raises(CheckpointError, match="has no 'model/nonesuch'"):
        reader.read("model", "nonesuch", Piece.whole("nonesuch", (1,)))
    with pytest.raises(CheckpointError, match=r"has shape \(9, 1\) here and \(9,\) in"):
        reader.read("model", "mask", Piece.whole("mask", (9, 1)))
    with pytest.raises(CheckpointError, match=r"not a finished checkpoint: it has no manifest\.json"):
        opened(tmp_path, "step-00000041")


def test_chunks_that_overlap_are_refused(tmp_path: Path) -> None:
    """As many elements as the tensor has, but some of them twice."""
    manifest = making.write(tmp_path, 40, {("model", "x"): Whole("int32", filled((8,), "int32", 0))})
    whole = Piece.whole("x", (8,))
    forged = [replace(one, chunk=replace(one.chunk, piece=whole.flattened(0, 4))) for one in manifest.entries]
    making.publish(tmp_path, replace(manifest, entries=tuple(forged)))
    with pytest.raises(CheckpointError, match=r"'model/x', elements from \(4,\) on are missing"):
        opened(tmp_path).read("model", "x", whole.shard(0, 0, 2))


def test_a_sealed_lie_about_a_reference_takes_no_memory(tmp_path: Path) -> None:
    """The tensor would be of 4 EB: refused for its file's size, before anything is allocated."""
    manifest = making.write(tmp_path, 40, {("model", "x"): Whole("int32", filled((8,), "int32", 0))}, num_ranks=1)
    shape = (1 << 60,)
    chunk = replace(manifest.entries[0].chunk, piece=Piece.whole("x", shape), num_bytes=4 << 60)
    entry = replace(manifest.entries[0], chunk=chunk, file="step-00000020/data-00000-of-00001.safetensors")
    making.write(tmp_path, 20, a_state(), num_ranks=1)
    making.publish(tmp_path, replace(manifest, is_full=False, entries=(entry,)))
    with pytest.raises(CheckpointError, match="lies beyond the"):
        opened(tmp_path).read("model", "x", Piece.whole("x", shape))


def test_the_newest_sound_one_is_opened_with_a_word_about_the_rest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "checkpoints"
    making.write(root, 20, a_state(1))
    making.write(root, 40, a_state(2))
    assert open_newest(str(tmp_path)).manifest.step == 40
    data_file(root).unlink()
    assert open_newest(str(tmp_path)).manifest.step == 20
    assert "step-00000040 was skipped" in caplog.text
    (root / "step-00000020" / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"no valid checkpoint at .*is missing.*not written by closeranks"):
        open_newest(str(tmp_path))


def test_a_renamed_copy_may_be_read_but_not_under_another_steps_name(tmp_path: Path) -> None:
    state = a_state()
    making.write(tmp_path, 40, state)
    (tmp_path / NAME).rename(tmp_path / "best")
    assert read_all(opened(tmp_path, "best")) == {name: whole.values.tobytes() for name, whole in state.items()}
    (tmp_path / "best").rename(tmp_path / "step-00000050")
    with pytest.raises(CheckpointError, match="it was saved as step-00000040"):
        opened(tmp_path, "step-00000050")


def test_what_the_writer_writes_is_read_and_found_sound(tmp_path: Path) -> None:
    where = saving.settings(tmp_path)
    for step in (20, 40):
        for rank in (1, 0):  # rank 0 waits for the parts of the others
            assert "failed" not in saving.kinds(saving.save(saving.order(step, rank, 2), where))
    reader = open_newest(str(tmp_path))
    reader.check_files()
    assert reader.manifest.referenced_files(), "what did not change is referred to"
    for key, values in saving.state(40).items():
        assert octets(reader.read("model", key, Piece.whole(key, values.shape))) == values.tobytes()
    assert verify_all(find_checkpoints(str(tmp_path))) == []


def test_an_object_store_is_read_like_a_disk() -> None:
    place = f"memory://test-reader-{uuid.uuid4().hex}/run"
    storage = open_storage(f"{place}/checkpoints")
    golden = Path(__file__).parents[1] / "golden"
    for path in sorted(path for path in golden.rglob("*") if path.is_file()):
        storage.publish(str(path.relative_to(golden)), path.read_bytes())
    near, far = open_newest(str(golden)), open_newest(place)
    assert far.path == f"{place}/checkpoints/step-00000004"
    assert read_all(far) == read_all(near)
    assert [found.name for found in find_checkpoints(f"{far.path}/")] == ["step-00000004"]
    assert verify_all(find_checkpoints(place)) == []
    storage.remove("step-00000004/data-00001-of-00002.safetensors")
    with pytest.raises(CheckpointError, match=r"data-00001.* is missing"):
        read_all(CheckpointReader(storage, "step-00000004"))
    assert open_newest(place).manifest.step == 2
