"""Files that are cut, gone, exchanged, foreign, locked or lied about: clear errors, never garbage, never a hang."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crc32c import crc32c

from closeranks.core.errors import BadRecordError, DataError
from closeranks.data.shards.manifest import read_manifest
from closeranks.data.shards.records import ShardRecords
from closeranks.data.shards.shard_format import FOOTER_BYTES, HEADER_BYTES
from closeranks.data.shards.tokens import ShardTokens
from closeranks.data.shards.verify import verify
from tests.data.shards.made import documents, opened, records, same, write_records, write_tokens
from tests.data.shards.test_bit_flips import read_records, read_tokens

KINDS = pytest.mark.parametrize("kind", ["tokens", "records"])


def made(folder: Path, kind: str, seed: int = 0) -> Callable[[Path], bytes]:
    if kind == "tokens":
        write_tokens(folder, documents(seed=seed))
        return read_tokens
    write_records(folder, records(seed=seed))
    return read_records


def refused(folder: Path, read: Callable[[Path], bytes], name: str) -> str:
    """Both the readers and ``verify`` say so, and name the file."""
    with pytest.raises(DataError) as caught:
        read(folder)
    assert not isinstance(caught.value, BadRecordError), "a shard as a whole is not a record to skip"
    assert name in str(caught.value)
    findings = verify(opened(folder))
    assert any(finding.file.endswith(name) for finding in findings)
    return str(caught.value)


@KINDS
def test_truncation_anywhere(tmp_path: Path, kind: str) -> None:
    read = made(tmp_path, kind)
    for path in (tmp_path / "shard-00001.crs", tmp_path / "dataset.json"):
        data = path.read_bytes()
        size = len(data)
        lengths = {0, 1, 8, HEADER_BYTES - 1, HEADER_BYTES, 4095, 4096, 4097, size // 2}
        lengths |= {size - FOOTER_BYTES - 1, size - FOOTER_BYTES, size - FOOTER_BYTES + 8, size - 4, size - 1}
        for length in sorted(length for length in lengths if length < size):
            path.write_bytes(data[:length])
            refused(tmp_path, read, path.name)
        path.write_bytes(data + b"\0")
        refused(tmp_path, read, path.name)
        path.write_bytes(data)
    assert verify(opened(tmp_path)) == []


@KINDS
def test_a_missing_shard(tmp_path: Path, kind: str) -> None:
    read = made(tmp_path, kind)
    (tmp_path / "shard-00001.crs").unlink()
    refused(tmp_path, read, "shard-00001.crs")


@KINDS
def test_shards_exchanged_with_each_other(tmp_path: Path, kind: str) -> None:
    read = made(tmp_path, kind)
    first, second = tmp_path / "shard-00000.crs", tmp_path / "shard-00001.crs"
    first.rename(tmp_path / "aside")
    second.rename(first)
    (tmp_path / "aside").rename(second)
    refused(tmp_path, read, "shard-00000.crs")


def test_a_shard_of_the_same_size_of_another_data_set(tmp_path: Path) -> None:
    for name, token in (("a", 1), ("b", 2)):
        write_tokens(tmp_path / name, [np.full(3000, token, np.uint16)] * 4)
    assert (tmp_path / "a" / "shard-00001.crs").stat().st_size == (tmp_path / "b" / "shard-00001.crs").stat().st_size
    shutil.copy(tmp_path / "b" / "shard-00001.crs", tmp_path / "a" / "shard-00001.crs")
    assert "not the shard that was written under this name" in refused(tmp_path / "a", read_tokens, "shard-00001.crs")


@KINDS
def test_a_folder_or_a_permission_in_the_way(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read = made(tmp_path, kind)
    real = os.open

    def denied(path: Any, *args: Any, **settings: Any) -> int:
        if str(path).endswith("shard-00001.crs"):
            raise PermissionError(13, "Permission denied")
        return real(path, *args, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", denied)
        with pytest.raises(DataError, match=r"shard-00001\.crs.*Permission denied"):
            read(tmp_path)
        with pytest.raises(DataError, match=r"shard-00001\.crs' cannot be read: Permission denied\. Check its owner"):
            verify(opened(tmp_path))
    path = tmp_path / "shard-00001.crs"
    path.unlink()
    path.mkdir()
    refused(tmp_path, read, "shard-00001.crs")


def resealed(path: Path, change: Callable[[bytearray], None]) -> None:
    """Change a shard as a wrong writer would: all checksums of the file itself are right again."""
    from closeranks.data.shards import shard_format

    data = bytearray(path.read_bytes())
    footer = shard_format.decode_footer(bytes(data[-FOOTER_BYTES:]), len(data))
    change(data)
    shape = footer.shape
    size = shape.block_bytes
    blocks = [bytes(data[at : min(at + size, shape.table_offset)]) for at in range(0, shape.table_offset, size)]
    table = b"".join(crc32c(block).to_bytes(4, "little") for block in blocks)
    table = table.ljust(shape.footer_offset - shape.table_offset, b"\0")
    new = shard_format.ShardFooter(footer.head, shape, footer.largest, shard_format.blake3(table).digest())
    path.write_bytes(data[: shape.table_offset] + table + shard_format.encode_footer(new))


def test_an_index_that_lies_gives_no_garbage(tmp_path: Path) -> None:
    """With every checksum right, even that of ``dataset.json``."""
    from closeranks.data.shards.commit import commit
    from closeranks.data.shards.manifest import DatasetInfo

    write_records(tmp_path, records())
    manifest = read_manifest(opened(tmp_path))
    at = manifest.shards[1].regions(4096).index_offset + 8
    for value in (2**62, 2**63 + 5, 0, 3, manifest.shards[1].data_bytes + 8):
        original = (tmp_path / "shard-00001.crs").read_bytes()

        def lie(data: bytearray, value: int = value) -> None:
            data[at : at + 8] = value.to_bytes(8, "little")

        resealed(tmp_path / "shard-00001.crs", lie)
        refused(tmp_path, read_records, "shard-00001.crs")  # it is not the shard that was listed
        commit(tmp_path, [shard.name for shard in manifest.shards], DatasetInfo())
        with pytest.raises(DataError, match=r"lies outside|cannot be decoded"):
            read_records(tmp_path)
        assert "index" in str(verify(opened(tmp_path))[0])
        (tmp_path / "shard-00001.crs").write_bytes(original)
        commit(tmp_path, [shard.name for shard in manifest.shards], DatasetInfo())


def test_a_record_that_lies_is_named(tmp_path: Path) -> None:
    from closeranks.data.shards.commit import commit
    from closeranks.data.shards.manifest import DatasetInfo

    table = [{"x": np.arange(10), "s": "text"} for _ in range(5)]
    write_records(tmp_path, table)
    place = ShardRecords(opened(tmp_path)).where(3)

    def lie(data: bytearray) -> None:
        data[place.offset + 8 : place.offset + 16] = (11).to_bytes(8, "little")  # eleven elements, not ten

    resealed(tmp_path / "shard-00000.crs", lie)
    commit(tmp_path, ["shard-00000.crs"], DatasetInfo())
    store = ShardRecords(opened(tmp_path))
    with pytest.raises(BadRecordError, match=rf"shard-00000.crs', byte {place.offset}: the record cannot be decoded"):
        store.read(np.array([1, 3]))
    assert all(same(table[0], record) for record in store.read(np.array([0, 1, 2, 4])))
    assert "record 3 at byte" in str(verify(opened(tmp_path))[0])


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 16
    path.write_bytes(data)


def test_only_samples_in_the_damaged_block_are_bad(tmp_path: Path) -> None:
    table = records(60)
    write_records(tmp_path, table, shard_bytes=1 << 20)
    place = ShardRecords(opened(tmp_path)).where(20)
    path = tmp_path / "shard-00000.crs"
    flip(path, place.offset)
    block = place.offset // 4096
    store = ShardRecords(opened(tmp_path))
    good, bad, reasons = [], [], set()
    for number in range(60):
        try:
            good.append(same(table[number], store.read(np.array([number]))[0]))
        except BadRecordError as error:
            reasons.add(error.what)
            bad.append(number)
    assert all(good)
    assert 20 in bad
    bytes_hit = f"bytes {block * 4096} to {block * 4096 + 4096}"
    assert reasons == {f"'{path}' is damaged: block {block}, {bytes_hit}, does not match its checksum"}
    (finding,) = verify(opened(tmp_path))
    assert (finding.unit, finding.first, finding.last) == ("records", bad[0], bad[-1] + 1)
    assert bad == list(range(bad[0], bad[-1] + 1))
    assert (finding.offset, finding.num_bytes) == (block * 4096, 4096)
    assert f"records {bad[0]} to {bad[-1]} are affected" in str(finding)


def test_damaged_tokens_and_damaged_ends_of_documents(tmp_path: Path) -> None:
    docs = [np.arange(900, dtype=np.uint16) for _ in range(3000)]
    manifest = write_tokens(tmp_path, docs, shard_bytes=1 << 20)
    path, shape = tmp_path / "shard-00001.crs", manifest.shards[1].regions(4096)
    first = manifest.shards[0].data_bytes // 2
    flip(path, 4096 * 3 + 5)
    flip(path, shape.index_offset + 4096)
    store = ShardTokens(opened(tmp_path))
    hit = (first + 4096, first + 6144)
    for start in (hit[0] - 100, hit[0], hit[1] - 1):
        with pytest.raises(BadRecordError, match="block 3, bytes 12288 to 16384"):
            store.read(np.array([5, start]), 101)
    for start in (hit[0] - 101, hit[1], 0):
        stream = (np.arange(start, start + 101) % 900).tolist()
        assert store.read(np.array([start]), 101)[0].tolist() == stream
    with pytest.raises(DataError, match="which holds the ends of documents") as caught:
        _ = store.ends
    assert not isinstance(caught.value, BadRecordError)
    findings = verify(opened(tmp_path))
    assert (findings[0].unit, findings[0].first, findings[0].last) == ("tokens", *hit)
    assert len(findings) == 2


def test_a_shard_cut_while_it_is_mapped_is_an_error_not_a_signal(tmp_path: Path) -> None:
    write_tokens(tmp_path, [np.arange(900, dtype=np.uint16) for _ in range(300)], shard_bytes=1 << 20)
    store = ShardTokens(opened(tmp_path))
    store.read(np.array([0]), 10)
    os.truncate(tmp_path / "shard-00000.crs", 8192)
    with pytest.raises(DataError, match="cannot be read at byte"):
        store.read(np.array([100_000]), 10)


def test_tokens_beyond_the_vocabulary_are_refused_and_found(tmp_path: Path) -> None:
    from closeranks.data.shards.commit import commit
    from closeranks.data.shards.manifest import DatasetInfo, DatasetManifest, encode_manifest

    with pytest.raises(BadRecordError, match="holds the token 1000, and tokens are from 0 to 999"):
        write_tokens(tmp_path, [[1, 1000]])
    with pytest.raises(BadRecordError, match="holds the token -1"):
        write_tokens(tmp_path, [[1, -1]], dtype="int32")
    for wrong in ([1.5], [[1]], ["a"]):
        with pytest.raises(BadRecordError, match="not a row of integers"):
            write_tokens(tmp_path, [wrong])
    with pytest.raises(DataError, match="cannot be stored as 'float32'"):
        write_tokens(tmp_path, [], dtype="float32")
    manifest = write_tokens(tmp_path, [[1, 500]])
    with pytest.raises(DataError, match="holds the token 500, and the vocabulary has 400"):
        commit(tmp_path, ["shard-00000.crs"], DatasetInfo(400))
    lie = DatasetManifest(manifest.head, DatasetInfo(400), {}, manifest.shards)
    (tmp_path / "dataset.json").write_bytes(encode_manifest(lie))
    assert "largest token is 500" in str(verify(opened(tmp_path))[0])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"kind": "pictures"}, "kind 'pictures'"),
        ({"dtype": "float32"}, "dtype 'float32'"),
        ({"block_bytes": 5000}, "blocks of 5000 bytes"),
        ({"num_items": 7}, "not the sums"),
        ({"shards": [["../evil.crs", 1, 1, 1, 1, 1, "0" * 64]]}, "evil.crs"),
        ({"shards": [["a.crs", 1, 1, 1, 1, 1, "0" * 64]]}, "'a.crs' has 1 bytes of data"),
        ({"shards": [["a.crs", 1, 1, 2, 1, 1, "0" * 64]], "num_items": 1, "num_units": 1}, "contradict each other"),
        ({"shards": "many"}, "makes no sense"),
        ({"vocab_size": -1}, "'-1' where a count is expected"),
        ({"provenance": None}, "makes no sense"),
    ],
)
def test_a_document_that_makes_no_sense(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    import json

    from closeranks.storage.documents import seal

    write_tokens(tmp_path, documents())
    body = json.loads((tmp_path / "dataset.json").read_bytes().partition(b"\n")[2])
    (tmp_path / "dataset.json").write_bytes(seal("dataset", {**body, **change}, 1))
    assert reason in refused(tmp_path, read_tokens, "dataset.json")


def test_a_later_version_says_so(tmp_path: Path) -> None:
    from closeranks.storage.documents import seal

    write_tokens(tmp_path, documents())
    (tmp_path / "dataset.json").write_bytes(seal("dataset", {}, 2))
    assert "Update closeranks" in refused(tmp_path, read_tokens, "dataset.json")
