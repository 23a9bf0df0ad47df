"""Shards are mapped when needed, held in bounded number, and believed only after their checks."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from closeranks.core.errors import BadRecordError, DataError
from closeranks.data.files.local import LocalFiles
from closeranks.data.shards.manifest import DatasetManifest, encode_manifest
from closeranks.data.shards.records import ShardRecords
from closeranks.data.shards.tokens import ShardTokens
from tests.data.shards.made import documents, opened, records, same, write_records, write_tokens


class FarFiles(LocalFiles):
    """As if they lay far away; says what is held."""

    is_local = False

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.held: list[str] = []
        self.peak_held = 0
        self.holds = 0

    @contextmanager
    def local_path(self, name: str) -> Iterator[Path]:
        with super().local_path(name) as path:
            self.held.append(name)
            self.holds += 1
            self.peak_held = max(self.peak_held, len(self.held))
            try:
                yield path
            finally:
                self.held.remove(name)


def test_no_more_shards_are_held_than_allowed_and_those_in_use_stay(tmp_path: Path) -> None:
    table = records(300)
    manifest = write_records(tmp_path, table, shard_bytes=4000)
    assert len(manifest.shards) > 20
    files = FarFiles(tmp_path)
    store = ShardRecords(files, 4)
    rng = np.random.default_rng(0)
    for _ in range(30):
        indices = rng.integers(0, 300, 25)
        assert all(same(table[i], record) for i, record in zip(indices, store.read(indices), strict=True))
    assert files.peak_held == 4
    kept = store.files_of(np.array([0]))
    store.read(np.array([0]))
    before = files.holds
    for index in range(50, 300, 10):
        store.read(np.array([0]))
        store.read(np.array([index]))
    assert set(kept) <= set(files.held), "the shard used all the time was not let go"
    assert files.holds - before < 26
    store.close()
    assert files.held == []
    assert same(table[7], store.read(np.array([7]))[0]), "reading maps again"


def test_a_shard_that_came_back_is_checked_again(tmp_path: Path) -> None:
    docs = documents()
    manifest = write_tokens(tmp_path, docs)
    store = ShardTokens(FarFiles(tmp_path), 1)
    store.read(np.array([0]), 100)
    store.read(np.array([store.num_tokens - 100]), 100)
    path = tmp_path / manifest.shards[0].name
    data = bytearray(path.read_bytes())
    data[4096] ^= 1
    path.write_bytes(data)
    with pytest.raises(BadRecordError, match="block 1"):
        store.read(np.array([0]), 100)


def test_far_away_64_are_held(tmp_path: Path) -> None:
    write_tokens(tmp_path, [np.arange(10, dtype=np.uint16)] * 100, shard_bytes=40)
    files = FarFiles(tmp_path)
    assert ShardTokens(files).read(np.arange(0, 1000, 10), 10).tolist() == [list(range(10))] * 100
    assert (files.holds, files.peak_held) == (100, 64)


def test_a_shard_that_cannot_be_mapped_leaves_the_others_readable(tmp_path: Path) -> None:
    docs = documents()
    manifest = write_tokens(tmp_path, docs)
    path = tmp_path / manifest.shards[1].name
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    store, stream = ShardTokens(opened(tmp_path)), np.concatenate(docs)
    first = manifest.shards[0].data_bytes // 2
    for _ in range(2):
        with pytest.raises(DataError, match="were written"):
            store.read(np.array([0, first + 5]), 10)
        assert store.read(np.array([3]), 10)[0].tolist() == stream[3:13].tolist()
    path.write_bytes(data)
    assert store.read(np.array([first + 5]), 10)[0].tolist() == stream[first + 5 : first + 15].tolist()


def huge(folder: Path, num_shards: int) -> DatasetManifest:
    """A data set of shards that are not there, with a hundred million documents."""
    manifest = write_tokens(folder, documents(3))
    entry = replace(manifest.shards[0], num_items=10**8 // num_shards, data_bytes=200 << 20)
    shards = tuple(replace(entry, name=f"far-{number}.crs") for number in range(num_shards))
    far = replace(manifest, shards=shards)
    (folder / "dataset.json").write_bytes(encode_manifest(far))
    return far


OPEN = """
import resource, sys
from closeranks.data.files.open import open_files
from closeranks.data.shards.tokens import ShardTokens
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
store = ShardTokens(open_files(sys.argv[1]))
len(store.ends)
assert "torch" not in sys.modules
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_opening_a_hundred_million_documents_reads_the_document_alone(tmp_path: Path) -> None:
    far = huge(tmp_path, 1000)
    store = pickle.loads(pickle.dumps(ShardTokens(opened(tmp_path))))
    assert len(store.ends) == far.num_items == 10**8
    assert store.num_tokens == 1000 * (100 << 20)
    with pytest.raises(DataError, match=r"far-999\.crs"):
        store.read(np.array([store.num_tokens - 200]), 129)
    grown_kib = int(subprocess.check_output([sys.executable, "-c", OPEN, tmp_path], text=True))
    assert grown_kib < 16 << 10


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_permission_denied_is_said() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tokens(folder, documents())
        folder.chmod(0o755)
        (folder / "shard-00001.crs").chmod(0)
        os.seteuid(65534)
        try:
            store = ShardTokens(opened(folder))
            with pytest.raises(DataError, match=r"shard-00001\.crs.*[Pp]ermission denied"):
                store.read(np.array([0]), store.num_tokens)
        finally:
            os.seteuid(0)
