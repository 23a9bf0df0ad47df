"""TFRecord files that TensorFlow wrote: what it reads back is what we read, and no flipped bit passes."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from closeranks.core.errors import BadRecordError, DataError
from closeranks.data.files.open import open_files
from closeranks.data.formats.open import detect, open_tokens
from closeranks.data.formats.record_index.saved_index import IndexLocation
from closeranks.data.formats.records import tfrecord
from closeranks.data.formats.records.tf_example import InvalidExample, parse_example
from closeranks.data.formats.records.tfrecord import TfRecords, masked_crc32c
from tests.cli.calling import call
from tests.data.formats.local_files import FolderFiles

GOLDEN = Path(__file__).parents[1] / "golden" / "tfrecord"


def opened(root: Path) -> TfRecords:
    return TfRecords(FolderFiles(root), IndexLocation())


def expected() -> list[dict[str, Any]]:
    """What TensorFlow read back, as our records are."""

    def value(given: list[Any]) -> Any:
        given = [one.encode("latin-1") if isinstance(one, str) else one for one in given]
        return given[0] if len(given) == 1 else given

    rows = json.loads((GOLDEN / "expected.json").read_text())
    return [{name: value(given) for name, given in row.items()} for row in rows]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    copy = tmp_path / "set"
    shutil.copytree(GOLDEN / "two", copy)
    return copy


def plain(record: Any) -> dict[str, Any]:
    return {name: one.tolist() if isinstance(one, np.ndarray) else one for name, one in record.items()}


def test_what_tensorflow_wrote_is_read_by_number(folder: Path) -> None:
    records = opened(folder)
    assert detect(FolderFiles(folder)) == "tfrecord"
    assert len(records) == 7
    backwards = records.read(np.arange(6, -1, -1))
    assert [plain(one) for one in backwards] == expected()[::-1]
    assert backwards[0]["signed"].dtype == np.int64
    assert backwards[0]["weights"].dtype == np.float32
    assert records.where(4).file.endswith("train.tfrecord-00001-of-00002")
    assert records.where(4).offset == 0
    again = pickle.loads(pickle.dumps(records))
    assert plain(again.read(np.array([3]))[0]) == expected()[3]
    assert again.identity == records.identity


def test_a_field_is_tokens(folder: Path) -> None:
    tokens = open_tokens(FolderFiles(folder), "", IndexLocation(), "tokens")
    assert tokens.num_tokens == sum(range(1, 8))
    assert tokens.read(np.array([0]), 6)[0].tolist() == [0, 0, 1, 0, 1, 2]


def test_every_flipped_bit_is_noticed(folder: Path) -> None:
    """In a file as it was indexed, and in one that is indexed damaged."""
    path = folder / "train.tfrecord-00000-of-00002"
    data = path.read_bytes()
    first = int.from_bytes(data[:8], "little") + 16
    records = opened(folder)
    stat = path.stat()
    for bit in range(0, first * 8, 5):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << (bit % 8)
        with path.open("r+b") as file:  # the same file, which is mapped
            file.write(damaged)
        with pytest.raises(BadRecordError, match=r"does not match its checksum|length is not"):
            records.read(np.array([0]))
    assert stat.st_size == len(data)
    header = bytearray(data)
    header[3] ^= 1
    path.write_bytes(header)
    with pytest.raises(DataError, match="is damaged at byte 0: a record's length does not match its checksum"):
        opened(folder)


def test_a_file_cut_short_is_refused_and_an_empty_one_has_none(folder: Path) -> None:
    path = folder / "train.tfrecord-00000-of-00002"
    data = path.read_bytes()
    first = int.from_bytes(data[:8], "little") + 16
    for size in (5, first - 1, first + 3):
        path.write_bytes(data[:size])
        with pytest.raises(DataError, match=rf"damaged at byte {0 if size < first else first}: the file ends within"):
            opened(folder)
    path.write_bytes(b"")
    assert len(opened(folder)) == 3


@pytest.mark.parametrize("how", ["gzip", "zlib"])
def test_compressed_ones_are_refused_with_what_to_do(how: str, tmp_path: Path) -> None:
    shutil.copy(GOLDEN / "packed" / f"{how}.tfrecord", tmp_path)
    with pytest.raises(DataError, match=f"compressed with {how}.*gunzip"):
        opened(tmp_path)
    (tmp_path / f"{how}.tfrecord").rename(tmp_path / "a.tfrecord.gz")
    with pytest.raises(DataError, match="is compressed"):
        opened(tmp_path)


def test_what_is_no_example_is_a_bad_record(tmp_path: Path) -> None:
    shutil.copy(GOLDEN / "other" / "sequence.tfrecord", tmp_path)
    with pytest.raises(BadRecordError, match="SequenceExample"):
        opened(tmp_path).read(np.array([0]))
    text = b"\xffnot protobuf"
    header = len(text).to_bytes(8, "little")
    crcs = [masked_crc32c(one).to_bytes(4, "little") for one in (header, text)]
    (tmp_path / "sequence.tfrecord").write_bytes(header + crcs[0] + text + crcs[1])
    with pytest.raises(BadRecordError, match=r"not a tf\.train\.Example"):
        opened(tmp_path).read(np.array([0]))


@given(data=st.data())
def test_no_bytes_break_the_parser(data: st.DataObject) -> None:
    """Only its own error comes out, of noise and of a real example with some bytes changed."""
    whole = (GOLDEN / "two" / "train.tfrecord-00001-of-00002").read_bytes()[12:200]
    noise = data.draw(st.binary(max_size=40) | st.just(whole))
    damaged = bytearray(noise)
    for _ in range(data.draw(st.integers(0, 3))):
        if damaged:
            damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        parse_example(bytes(damaged))
    except InvalidExample:
        return


def test_numbers_that_are_not_packed_are_read() -> None:
    """As old writers wrote them: each with a tag of its own."""
    ints = b"\x08\x07\x08\x96\x01"
    feature = b"\x1a" + bytes([len(ints)]) + ints
    entry = b"\x0a\x01a\x12" + bytes([len(feature)]) + feature
    features = b"\x0a" + bytes([len(entry)]) + entry
    assert parse_example(b"\x0a" + bytes([len(features)]) + features)["a"].tolist() == [7, 150]


def test_the_verbs_take_it(folder: Path, tmp_path: Path) -> None:
    said = call("data", "verify", folder)
    assert (said.code, "every record compared with its checksums" in said.out) == (0, True), said
    assert call("data", "build", folder, "--out", tmp_path / "shards", "--field", "text").code == 0
    built = open_tokens(open_files(str(tmp_path / "shards")), "", IndexLocation(), "")
    assert bytes(built.read(np.array([0]), 7)[0].tolist()) == b"line 0 "
    path = folder / "train.tfrecord-00000-of-00002"
    damaged = bytearray(path.read_bytes())
    damaged[40] ^= 4
    path.write_bytes(damaged)
    said = call("data", "verify", folder)
    assert (said.code, "DAMAGED" in said.out) == (1, True), said


def test_its_names(tmp_path: Path) -> None:
    for name in ("a.tfrecord", "a.tfrecords", "a.TFREC", "a.tfrecord-00000-of-00010"):
        assert tfrecord.plain_name(name).endswith(tfrecord.SUFFIXES)
    assert not tfrecord.plain_name("a.tfrecord.txt").endswith(tfrecord.SUFFIXES)
