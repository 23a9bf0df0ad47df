"""A data file is a safetensors file, holds what the source had, and what does not is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from closeranks.checkpoint.format import data_file
from closeranks.checkpoint.format.data_file import ChunkSource, SaveError
from closeranks.checkpoint.format.digests import blake3_hex, crc32c, layout_independent_digest
from closeranks.checkpoint.format.manifest import Chunk, DataFile
from closeranks.core.pieces import Piece
from closeranks.storage.local import LocalStorage


def chunks_of(*arrays: tuple[str, str, np.ndarray]) -> tuple[dict[int, Chunk], ChunkSource]:
    datas = [array.tobytes() for _, _, array in arrays]
    chunks = {
        number: Chunk("model", key, dtype, Piece.whole(key, array.shape), len(data), crc32c(data))
        for number, ((key, dtype, array), data) in enumerate(zip(arrays, datas, strict=True))
    }
    return chunks, lambda number: memoryview(datas[number])


def some() -> tuple[dict[int, Chunk], ChunkSource]:
    flags = np.array([True, False, True])
    return chunks_of(
        ("a", "float32", np.arange(12, dtype=np.float32).reshape(3, 4)),
        ("flags", "bool", flags),
        ("a", "float32", np.ones((3, 4), np.float32)),
        ("empty", "int64", np.zeros((0, 5), np.int64)),
        ("strange", "float8_e4m3fnuz", np.arange(7, dtype=np.uint8)),
        ("last", "int64", np.arange(5)),
    )


def write(
    folder: Path, known: tuple[int, ...] = ()
) -> tuple[DataFile, data_file.DataFilePlan, dict[int, data_file.ChunkDigests]]:
    chunks, source = some()
    digests = {number: data_file.ChunkDigests("known", 1) for number in known}
    return data_file.write_data_file(LocalStorage(folder), "s/data.safetensors", chunks, source, digests, lambda: None)


def test_any_tool_opens_it(tmp_path: Path) -> None:
    file, plan, _ = write(tmp_path)
    loaded = load_file(tmp_path / "s/data.safetensors")
    assert sorted(loaded) == [f"model/{name}" for name in ("a#0", "a#1", "empty#0", "flags#0", "last#0", "strange#0")]
    np.testing.assert_array_equal(loaded["model/a#0"], np.arange(12, dtype=np.float32).reshape(3, 4))
    np.testing.assert_array_equal(loaded["model/strange#0"], np.arange(7, dtype=np.uint8))
    assert loaded["model/empty#0"].shape == (0, 5)
    data = (tmp_path / "s/data.safetensors").read_bytes()
    assert len(data) == file.num_bytes == plan.num_bytes
    assert crc32c(data[: file.header_bytes]) == file.header_crc32c
    assert plan.offsets[0] % 4096 == 0
    assert data[plan.offsets[5] :] == np.arange(5).tobytes()


def test_every_chunk_is_hashed_but_known_ones(tmp_path: Path) -> None:
    chunks, source = some()
    _, _, digests = write(tmp_path, known=(1, 5))
    assert digests[1] == digests[5] == data_file.ChunkDigests("known", 1)
    for number in (0, 2, 3, 4):
        data = source(number)
        share = layout_independent_digest(data, chunks[number].dtype, chunks[number].piece)
        assert digests[number] == data_file.ChunkDigests(blake3_hex(data), share)


@pytest.mark.parametrize("known", [(), (0, 1, 2, 3, 4, 5)])
@pytest.mark.parametrize("number", [0, 4, 5])
def test_memory_that_changed_is_found_and_nothing_stays(tmp_path: Path, number: int, known: tuple[int, ...]) -> None:
    chunks, source = some()
    wrong = bytearray(source(number))
    wrong[-1] ^= 1
    digests = {one: data_file.ChunkDigests("", 0) for one in known}
    with pytest.raises(SaveError, match=f"memory changed between copy and write: model/{chunks[number].key} is not"):
        data_file.write_data_file(
            *(LocalStorage(tmp_path), "s/data", chunks),
            lambda one: memoryview(wrong) if one == number else source(one),
            *(digests, lambda: None),
        )
    assert list((tmp_path / "s").iterdir()) == []


def test_a_save_can_be_given_up_between_chunks(tmp_path: Path) -> None:
    chunks, source = some()
    calls: list[int] = []

    def breathe() -> None:
        calls.append(1)
        if len(calls) == 3:
            raise SaveError("enough")

    with pytest.raises(SaveError, match="enough"):
        data_file.write_data_file(LocalStorage(tmp_path), "s/data", chunks, source, {}, breathe)
    assert list((tmp_path / "s").iterdir()) == []


def test_every_flipped_bit_is_found_when_read_back(tmp_path: Path) -> None:
    chunks, _ = some()
    file, plan, _ = write(tmp_path)
    path, storage = tmp_path / "s/data.safetensors", LocalStorage(tmp_path)
    good = path.read_bytes()
    data_file.read_back(storage, "s/data.safetensors", file, chunks.values(), lambda: None)
    for place in (0, 9, file.header_bytes - 1, *plan.offsets[:3], file.num_bytes - 1):
        path.write_bytes(good[:place] + bytes([good[place] ^ 4]) + good[place + 1 :])
        with pytest.raises(SaveError, match="was read back from storage with different bytes"):
            data_file.read_back(storage, "s/data.safetensors", file, chunks.values(), lambda: None)
    for cut, word in ((good[:-1], "short"), (good + b"\0", "longer")):
        path.write_bytes(cut)
        with pytest.raises(SaveError, match=word):
            data_file.read_back(storage, "s/data.safetensors", file, chunks.values(), lambda: None)


def test_chunks_may_be_larger_than_what_is_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_file, "_READ_BYTES", 5)
    chunks, _ = some()
    file, _, _ = write(tmp_path)
    data_file.read_back(LocalStorage(tmp_path), "s/data.safetensors", file, chunks.values(), lambda: None)
