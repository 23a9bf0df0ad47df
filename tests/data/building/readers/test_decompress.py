"""Files that may be compressed: whole content, or an error that names the file."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import zstandard

from closeranks.core.errors import DataError
from closeranks.data.building.readers.decompress import compression_of, open_stream, plain_name

CONTENT = random.Random(0).randbytes(3 << 20)


def zst(data: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(data)


PACK: dict[str, Callable[[bytes], bytes]] = {
    "plain.txt": bytes,
    "one.gz": gzip.compress,
    "two.gz": lambda data: gzip.compress(data[:1000]) + gzip.compress(data[1000:]),
    "one.zst": zst,
    "two.zst": lambda data: zst(data[:1000]) + zst(data[1000:]),
    "one.bz2": bz2.compress,
    "one.xz": lambda data: lzma.compress(data, preset=0),
    "empty.zst": lambda data: b"",
}


@cache
def packed(name: str) -> bytes:
    """Made where it is used: on import it would cost every process that collects this file seconds."""
    return PACK[name](CONTENT)


def read(path: Path) -> bytes:
    with open_stream(path, path.name, compression_of(path.name)) as stream:
        data = stream.content.read()
        assert stream.tell_bytes() == path.stat().st_size
        return data


@pytest.mark.parametrize("name", PACK)
def test_the_content_is_whole(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(packed(name))
    assert read(tmp_path / name) == (b"" if name.startswith("empty") else CONTENT)


def test_content_streamed_by_a_writer_that_knew_no_size(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with zstandard.ZstdCompressor().stream_writer(buffer, closefd=False) as writer:
        writer.write(CONTENT)
    (tmp_path / "x.zst").write_bytes(buffer.getvalue())
    assert read(tmp_path / "x.zst") == CONTENT


@pytest.mark.parametrize("name", ["one.gz", "one.zst", "two.zst", "one.bz2", "one.xz"])
def test_a_file_that_stops_too_early_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(packed(name)[:-700])
    with pytest.raises(DataError, match=f"'{name}' is damaged"):
        read(tmp_path / name)


@pytest.mark.parametrize("name", ["x.gz", "x.zst", "x.bz2", "x.xz"])
def test_a_file_that_is_something_else_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"hello, world")
    with pytest.raises(DataError, match=f"'{name}' is damaged"):
        read(tmp_path / name)


def test_names() -> None:
    assert (plain_name("a/b.jsonl.gz"), compression_of("a/b.jsonl.gz")) == ("a/b.jsonl", "gz")
    assert (plain_name("a/b.txt"), compression_of("a/b.txt")) == ("a/b.txt", "")


def test_a_file_that_may_not_be_read_is_named(tmp_path: Path) -> None:
    """A folder stands for one: root may read every file."""
    with pytest.raises(DataError, match="cannot be read: Is a directory"):
        read(tmp_path)
