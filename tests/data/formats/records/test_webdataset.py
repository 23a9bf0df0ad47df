"""Samples are those WebDataset itself gives, and torn archives are refused."""

from __future__ import annotations

import io
import logging
import pickle
import tarfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset
from hypothesis import given
from hypothesis import strategies as st
from webdataset.tariterators import group_by_keys, tar_file_expander

from closeranks.core.errors import BadRecordError, DataError
from closeranks.data.files.open import open_files
from closeranks.data.formats.record_index.saved_index import IndexLocation
from closeranks.data.formats.records.tar_members import BLOCK
from closeranks.data.formats.records.webdataset import TarRecords

NAMES = st.text(
    st.characters(codec="utf-8", exclude_characters="\0\n\r", exclude_categories=("Cs",)), min_size=1, max_size=12
)


@pytest.fixture
def place(tmp_path: Path) -> IndexLocation:
    return IndexLocation(folder=str(tmp_path / "index"))


def opened(path: Path, place: IndexLocation) -> TarRecords:
    return TarRecords(open_files(str(path)), place)


def everything(records: TarRecords) -> list[Any]:
    return [*records.read(np.arange(len(records)))]


def theirs(*paths: Path) -> list[dict[str, Any]]:
    """Their reader, on files that are closed in the end (their opener leaves that to chance)."""
    with ExitStack() as stack:
        sources = [{"url": str(path), "stream": stack.enter_context(path.open("rb"))} for path in paths]
        samples = group_by_keys(tar_file_expander(sources))
        return [{name: value for name, value in sample.items() if name != "__url__"} for sample in samples]


def write_tar(path: Path, members: list[tuple[str, bytes]], format: int = tarfile.GNU_FORMAT) -> Path:
    with tarfile.open(path, "w", format=format) as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def test_what_their_writer_wrote_is_what_their_reader_reads(tmp_path: Path, place: IndexLocation) -> None:
    draw = np.random.default_rng(0)
    folder = tmp_path / "d"
    folder.mkdir()
    paths = [folder / f"shard-{number:05d}.tar" for number in range(3)]
    for shard, path in enumerate(paths):
        with webdataset.TarWriter(str(path)) as writer:
            for number in range(20):
                sample = {"__key__": f"s/{shard}/{number:04d}", "jpg": draw.bytes(int(draw.integers(0, 2000)))}
                writer.write(
                    {**sample, "cls": number % 7, "json": {"a": [number]}, "seg.png": b"" if number == 3 else b"x"}
                )
    records = opened(folder, place)
    assert everything(records) == theirs(*paths)
    assert len(records) == 60
    assert records.block == 20
    assert records.read(np.array([59, 0]))[0]["__key__"] == "s/2/0019"
    assert records.files_of(np.array([45, 1, 46])) == ["shard-00002.tar", "shard-00000.tar"]


@given(
    names=st.lists(st.tuples(NAMES, st.sampled_from(["a", "b.C", "PNG", "", "x/y.z"])), max_size=12),
    format=st.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]),
    deep=st.booleans(),
)
def test_any_names_are_grouped_as_they_group_them(
    names: list[tuple[str, str]], format: int, deep: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("tar")
    seen, members = set(), []
    for number, (stem, field) in enumerate(names):
        name = f"{'long/' * 30 if deep else ''}{stem}.{field}".lstrip("/")
        if name.lower() not in seen:
            members.append((name, f"content {number}".encode()))
        seen.add(name.lower())
    path = write_tar(folder / "a.tar", members, format)
    try:
        expected = theirs(path)
    except ValueError:
        expected = None
    records = opened(path, IndexLocation(folder=str(folder / "index")))
    if expected is None:
        with pytest.raises(BadRecordError, match="two members"):
            everything(records)
    else:
        assert everything(records) == expected


def test_names_beyond_every_limit(tmp_path: Path, place: IndexLocation) -> None:
    members = [("n" * 300 + ".txt", b"1"), ("ü" * 120 + "/k.txt", b"2"), ("plain.txt", b"3")]
    for number, format in enumerate((tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)):
        path = write_tar(tmp_path / f"{number}.tar", members, format)
        assert everything(opened(path, place)) == theirs(path)
        assert len(theirs(path)) == 3


def test_sizes_in_base_256_are_read(tmp_path: Path, place: IndexLocation) -> None:
    path = write_tar(tmp_path / "a.tar", [("a.txt", b"hello"), ("b.txt", b"!")])
    data = bytearray(path.read_bytes())
    data[124:136] = b"\x80" + (5).to_bytes(11, "big")
    data[148:156] = b"%06o\0 " % (sum(data[:148]) + sum(data[156:512]) + 8 * 32)
    path.write_bytes(data)
    assert [row["txt"] for row in everything(opened(path, place))] == [b"hello", b"!"]


def test_a_size_in_pax_counts(tmp_path: Path, place: IndexLocation) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        info = tarfile.TarInfo("a.txt")
        info.size, info.pax_headers = 5, {"size": "5", "comment": "a = b"}
        archive.addfile(info, io.BytesIO(b"hello"))
    assert everything(opened(path, place)) == [{"__key__": "a", "txt": b"hello"}]


def test_what_is_no_plain_file_is_left_out(
    tmp_path: Path, place: IndexLocation, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as archive:
        for name, kind in (("d", tarfile.DIRTYPE), ("l.jpg", tarfile.SYMTYPE), ("h.jpg", tarfile.LNKTYPE)):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "x.jpg"
            archive.addfile(info)
        for name in ("__meta__", "__info__/x.txt", "README", ".hidden", "x.jpg"):
            info = tarfile.TarInfo(name)
            info.size = 3
            archive.addfile(info, io.BytesIO(b"abc"))
    with caplog.at_level(logging.WARNING):
        records = opened(path, place)
    assert everything(records) == theirs(path) == [{"__key__": "x", "jpg": b"abc"}]
    assert "7 members" in caplog.text


def test_a_sparse_file_is_left_out_with_all_its_headers(tmp_path: Path, place: IndexLocation) -> None:
    plain = write_tar(tmp_path / "plain.tar", [("s.bin", b"x" * 700), ("t.txt", b"after")])
    data = bytearray(plain.read_bytes())
    data[156:157], data[482:483] = b"S", b"\x01"
    data[148:156] = b"%06o\0 " % (sum(data[:148]) + sum(data[156:512]) + 8 * 32)
    more, last = bytearray(BLOCK), bytes(BLOCK)
    more[504] = 1
    path = tmp_path / "sparse.tar"
    path.write_bytes(data[:512] + more + last + data[512:])
    assert everything(opened(path, place)) == [{"__key__": "t", "txt": b"after"}]


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    folder = tmp_path / "d"
    folder.mkdir()
    return write_tar(folder / "a.tar", [(f"{number}.txt", b"x" * 600) for number in range(4)])


@pytest.mark.parametrize(
    ("keep", "reason"),
    [
        (2 * 1536 + 512 + 100, r"truncated: member '2.txt' at byte 3072 ends at byte 4184, and the file at byte 3684"),
        (2 * 1536 + 100, r"truncated inside a header at .* byte 3072"),
        (2 * 1536, r"no end mark at .* byte 3072"),
        (0, "no end mark"),
    ],
)
def test_a_torn_archive_is_refused(whole: Path, place: IndexLocation, keep: int, reason: str) -> None:
    whole.write_bytes(whole.read_bytes()[:keep])
    with pytest.raises(DataError, match=reason) as caught:
        opened(whole, place)
    assert not isinstance(caught.value, BadRecordError), "samples are missing: nothing to skip"
    assert "a.tar" in str(caught.value)


def test_the_end_mark_can_be_appended_as_the_error_says(whole: Path, place: IndexLocation) -> None:
    whole.write_bytes(whole.read_bytes()[: 4 * 1536])
    with pytest.raises(DataError, match=r"truncate -s \+1024"):
        opened(whole, place)
    with whole.open("ab") as file:
        file.truncate(4 * 1536 + 1024)
    assert len(opened(whole, place)) == 4


def test_every_damaged_header_is_found(whole: Path, place: IndexLocation) -> None:
    sound = whole.read_bytes()
    for byte in range(1536, 1536 + 512, 7):
        damaged = bytearray(sound)
        damaged[byte] ^= 0x10
        whole.write_bytes(damaged)
        with pytest.raises(DataError, match="at byte 1536 there is no member header"):
            opened(whole, place)


@pytest.mark.parametrize("name", ["a.tar.gz", "a.tgz", "a.tar.zst"])
def test_compressed_archives_are_to_be_converted(tmp_path: Path, place: IndexLocation, name: str) -> None:
    (tmp_path / name).write_bytes(b"1234")
    with pytest.raises(DataError, match=rf"{name}' is compressed.*closeranks data build"):
        opened(tmp_path, place)


def test_a_place_names_file_and_byte(whole: Path, place: IndexLocation) -> None:
    assert str(opened(whole, place).where(1)) == f"'{whole}', byte {1536 + 512}"


def test_pickled_records_open_their_files_again(whole: Path, place: IndexLocation) -> None:
    records = opened(whole, place)
    data = pickle.dumps(records)
    assert len(data) < 2000
    assert everything(pickle.loads(data)) == everything(records)


def test_indexing_and_reading_are_fast(tmp_path: Path, place: IndexLocation) -> None:
    # The library takes half a minute for as many: one header of its making, under other names.
    first = write_tar(tmp_path / "first.tar", [("000000.a", b"0" * 100)]).read_bytes()
    path = tmp_path / "a.tar"
    with path.open("wb") as file:
        for number in range(50_000):
            member = bytearray(first[: 2 * BLOCK])
            member[:8] = f"{number // 2:06d}.{'ab'[number % 2]}".encode()
            change = sum(member[:8]) - sum(b"000000.a")
            member[148:154] = b"%06o" % (int(member[148:154], 8) + change)
            file.write(member)
        file.write(bytes(2 * BLOCK))
    started = time.process_time()
    records = opened(path, place)
    assert time.process_time() - started < 2.0
    order = np.random.default_rng(0).permutation(25_000)
    started = time.process_time()
    found = records.read(order)
    assert time.process_time() - started < 2.0
    assert [row["__key__"] for row in found[:5]] == [f"{n:06d}" for n in order[:5]]
