"""A data set of the first version stays readable, by a reader without our code too, and is written so today."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from closeranks.data.shards.manifest import read_manifest
from closeranks.data.shards.records import ShardRecords
from closeranks.data.shards.tokens import ShardTokens
from closeranks.data.shards.verify import verify
from tests.data.shards import golden_content, plain_reader
from tests.data.shards.golden_content import GOLDEN
from tests.data.shards.made import content, opened, same


def test_golden_tokens() -> None:
    store = ShardTokens(opened(GOLDEN / "tokens"))
    stream = store.read(np.array([0]), store.num_tokens)[0]
    documents = np.split(stream, np.asarray(store.ends)[:-1])
    assert [document.tolist() for document in documents] == golden_content.documents()
    assert store.identity == "shards of 40 documents, blake3 3cdfa16be78fa58ae35094d926192b7f"


def test_golden_records() -> None:
    store = ShardRecords(opened(GOLDEN / "records"))
    assert all(same(a, b) for a, b in zip(golden_content.records(), store.read(np.arange(len(store))), strict=True))
    assert store.identity == "shards of 38 records, blake3 b2672eec1e21a1edbd6548ed632ccc4a"


def test_golden_data_sets_are_sound_and_have_several_shards() -> None:
    for kind in ("tokens", "records"):
        assert verify(opened(GOLDEN / kind)) == []
        assert len(read_manifest(opened(GOLDEN / kind)).shards) > 1


def test_a_reader_without_our_code_reads_the_same() -> None:
    assert plain_reader.read_tokens(GOLDEN / "tokens") == golden_content.documents()
    found = plain_reader.read_records(GOLDEN / "records")
    assert all(same(a, b) for a, b in zip(golden_content.records(), found, strict=True))


def test_the_same_bytes_are_written_today(tmp_path: Path) -> None:
    """A change of these bytes is a change of the format: raise its version, and keep this data set as it is."""
    golden_content.write(tmp_path)
    for kind in ("tokens", "records"):
        assert content(tmp_path / kind) == content(GOLDEN / kind)
