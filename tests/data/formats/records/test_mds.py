from __future__ import annotations

import io
import json
import pickle
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from closeranks.core.errors import BadRecordError, DataError
from closeranks.data.formats.record_index.saved_index import IndexLocation
from closeranks.data.formats.records import mds
from closeranks.data.formats.records.mds import MdsRecords
from closeranks.data.formats.records.mds_values import decoder_of
from tests.data.formats.local_files import FolderFiles

GOLDEN = Path(__file__).parents[1] / "golden" / "mds"
LOSSY = ("photo", "photos")


def opened(root: Path) -> MdsRecords:
    return mds.open_records(FolderFiles(root), IndexLocation())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    copy = tmp_path / "set"
    shutil.copytree(GOLDEN / "all", copy)
    return copy


def edit(folder: Path, **changes: Any) -> None:
    """Set these keys of every shard in the index; a dict is merged."""
    index = json.loads((folder / "index.json").read_text())
    for shard in index["shards"]:
        for key, value in changes.items():
            shard[key] = {**shard[key], **value} if isinstance(value, dict) else value
    (folder / "index.json").write_text(json.dumps(index))


def flips(data: bytes, step: int) -> Iterator[bytes]:
    for at in range(0, len(data), step):
        damaged = bytearray(data)
        damaged[at] ^= 1 << (at % 8)
        yield bytes(damaged)


def plain(name: str, value: Any) -> Any:
    """As in ``expected.json``; what JPEG lost is not compared."""
    if name == "drawn":
        value = np.asarray(Image.open(io.BytesIO(value)))
    if isinstance(value, np.ndarray):
        return {"dtype": str(value.dtype), "values": value.tolist()}
    return value.hex() if isinstance(value, bytes) else value


def test_reads_what_mosaic_wrote() -> None:
    records = opened(GOLDEN / "all")
    expected = json.loads((GOLDEN / "all" / "expected.json").read_text())
    assert len(records) == len(expected) == 12
    assert records.block == 2
    order = np.random.default_rng(1).permutation(12)
    for number, record in zip(order.tolist(), records.read(order), strict=True):
        wanted = {**expected[number], "s_decimal": float(expected[number]["s_decimal"])}
        assert record.keys() == wanted.keys()
        for name in wanted.keys() - set(LOSSY):
            assert plain(name, record[name]) == wanted[name], name
        assert Image.open(io.BytesIO(record["photo"])).size == (6, 4)
        assert [Image.open(io.BytesIO(photo)).format for photo in record["photos"]] == ["JPEG"] * wanted["photos"]
    assert records.read(np.asarray([3, 3]))[0]["label"] == records.read(np.asarray([3]))[0]["label"]


def test_says_where_a_sample_lies() -> None:
    records = opened(GOLDEN / "all")
    assert str(records.where(3)) == f"'{GOLDEN / 'all' / 'shard.00001.mds'}', sample 1"
    assert records.files_of(np.asarray([5, 0, 4])) == ["shard.00002.mds", "shard.00000.mds"]
    with pytest.raises(DataError, match="there is no"):
        records.read(np.asarray([12]))


def test_survives_pickling_and_closing() -> None:
    records = opened(GOLDEN / "all")
    again = pickle.loads(pickle.dumps(records))
    assert again.identity == records.identity
    records.close()
    assert again.read(np.asarray([7]))[0]["caption"] == records.read(np.asarray([7]))[0]["caption"]


def test_is_known_by_its_index(tmp_path: Path) -> None:
    for name in ("all", "zstd", "pickled"):
        files = FolderFiles(GOLDEN / name)
        assert mds.is_format(files.list(), files)
    (tmp_path / "index.json").write_text("{}")
    assert not mds.is_format(FolderFiles(tmp_path).list(), FolderFiles(tmp_path))


def test_what_would_be_unpickled_is_refused() -> None:
    with pytest.raises(DataError, match="column 'thing' is pickled"):
        opened(GOLDEN / "pickled")


def test_compressed_shards_are_to_be_converted() -> None:
    with pytest.raises(DataError, match=r"compressed by zstd.*closeranks data build"):
        opened(GOLDEN / "zstd")


def test_a_folder_of_splits_names_them(tmp_path: Path) -> None:
    for split in ("train", "val"):
        shutil.copytree(GOLDEN / "all", tmp_path / split)
    with pytest.raises(DataError, match=r"several MDS datasets: train, val\. Choose one"):
        opened(tmp_path)
    shutil.rmtree(tmp_path / "train")
    with pytest.raises(DataError, match=r"holds an MDS dataset in a subfolder: val\. Choose one"):
        opened(tmp_path)


@pytest.mark.parametrize("hashes", [["sha1"], ["xxh64"]])
def test_every_flip_of_a_shard_with_a_hash_is_a_bad_record(folder: Path, hashes: list[str]) -> None:
    index = json.loads((folder / "index.json").read_text())
    for shard in index["shards"]:
        shard["raw_data"]["hashes"] = {name: shard["raw_data"]["hashes"][name] for name in hashes}
    (folder / "index.json").write_text(json.dumps(index))
    path = folder / "shard.00001.mds"
    for damaged in flips(path.read_bytes(), 97):
        path.write_bytes(damaged)
        records = opened(folder)
        for _ in range(2):
            with pytest.raises(BadRecordError, match=rf"shard\.00001\.mds', sample 1: the shard's {hashes[0]} is"):
                records.read(np.asarray([3]))
        assert records.read(np.asarray([0, 4]))[0]["u8"] == 0


def test_without_hashes_a_flip_is_told_or_changes_values_and_nothing_worse(folder: Path) -> None:
    edit(folder, raw_data={"hashes": {}})
    path = folder / "shard.00000.mds"
    num_told = 0
    for damaged in flips(path.read_bytes(), 11):
        path.write_bytes(damaged)
        try:
            assert len(opened(folder).read(np.asarray([0, 1]))) == 2
        except DataError:
            num_told += 1
    assert num_told > 10


def test_hashes_nobody_can_make_are_said(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    edit(folder, raw_data={"hashes": {"blake9": "00"}})
    caplog.set_level("WARNING")
    assert opened(folder).read(np.asarray([0]))[0]["u8"] == 0
    assert "blake9" in caplog.text


@pytest.mark.parametrize("keep", [0, 3, 20, 3000])
def test_a_cut_shard_is_an_error_and_no_bad_record(folder: Path, keep: int) -> None:
    path = folder / "shard.00001.mds"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataError, match=rf"it has {keep} bytes, and 4266 according to") as caught:
        opened(folder).read(np.asarray([2]))
    assert not isinstance(caught.value, BadRecordError)


def test_a_missing_shard_is_an_error(folder: Path) -> None:
    (folder / "shard.00003.mds").unlink()
    with pytest.raises(DataError, match=r"shard\.00003\.mds' is missing"):
        opened(folder).read(np.asarray([6]))


def test_a_damaged_index_is_an_error(folder: Path) -> None:
    sound = (folder / "index.json").read_bytes()
    for keep in (0, 1, 300, len(sound) - 2):
        (folder / "index.json").write_bytes(sound[:keep])
        with pytest.raises(DataError, match=r"index\.json' is damaged"):
            opened(folder)
    (folder / "index.json").write_bytes(sound)
    edit(folder, samples=3)
    with pytest.raises(DataError, match="holds 2 samples, and 3 according to"):
        opened(folder).read(np.asarray([0]))
    edit(folder, version=3)
    with pytest.raises(DataError, match="version 3"):
        opened(folder)
    for damaged in flips(sound, 23):
        (folder / "index.json").write_bytes(damaged)
        with suppress(DataError):
            opened(folder).read(np.asarray([0, 11]))


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "RGBA", "CMYK", "I", "F", "I;16"])
def test_raw_images_of_every_mode_equal_pillows_arrays(mode: str) -> None:
    image = Image.new(mode, (11, 3))
    for x in range(11):
        image.putpixel((x, x % 3), (x * 20,) * len(image.getbands()) if len(image.getbands()) > 1 else x)
    head = np.asarray([11, 3, len(mode)], "<u4").tobytes()
    found = decoder_of("pil", "raw")(head + mode.encode() + image.tobytes())
    assert found.dtype == np.asarray(image).dtype
    assert (found == np.asarray(image)).all()


def test_an_unknown_encoding_names_its_column() -> None:
    with pytest.raises(DataError, match="'x' has the encoding 'hologram'"):
        decoder_of("hologram", "x")
