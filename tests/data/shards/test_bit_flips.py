"""A thousand single flipped bits, anywhere in the files of two data sets: each is detected or provably harmless."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from closeranks.core.errors import DataError
from closeranks.data.shards.records import ShardRecords
from closeranks.data.shards.shard_format import DATA_OFFSET, HEADER_BYTES, SUFFIX
from closeranks.data.shards.tokens import ShardTokens
from closeranks.data.shards.verify import verify
from tests.data.shards.made import documents, opened, records, write_records, write_tokens

NUM_FLIPS = 250


def read_tokens(folder: Path) -> bytes:
    store = ShardTokens(opened(folder))
    ends = np.asarray(store.ends)
    stream = store.read(np.zeros(1, np.int64), store.num_tokens)
    return pickle.dumps((store.identity, store.vocab_size, ends.tolist(), stream.tolist()))


def read_records(folder: Path) -> bytes:
    store = ShardRecords(opened(folder))
    found = [
        {key: (v.dtype.name, v.shape, v.tobytes()) if isinstance(v, np.ndarray) else v for key, v in record.items()}
        for record in store.read(np.arange(len(store)))
    ]
    return pickle.dumps((store.identity, store.fields, found))


def outcome(folder: Path, read: Callable[[Path], bytes], expected: bytes) -> str:
    try:
        found = read(folder)
    except DataError as error:
        return "detected on reading" if str(folder) in str(error) else f"an error that names no file: {error}"
    return "harmless" if found == expected else "garbage"


def sweep(folder: Path, read: Callable[[Path], bytes], bits: Any) -> Counter[str]:
    """``bits`` count through all bytes of all files."""
    paths = sorted(folder.iterdir())
    starts = np.cumsum([0, *(path.stat().st_size for path in paths)])
    expected = read(folder)
    assert verify(opened(folder)) == []
    counts: Counter[str] = Counter()
    for bit in bits:
        number = int(starts.searchsorted(bit // 8, side="right")) - 1
        data = paths[number].read_bytes()
        damaged = bytearray(data)
        damaged[bit // 8 - int(starts[number])] ^= 1 << (bit % 8)
        paths[number].write_bytes(damaged)
        counts[outcome(folder, read, expected)] += 1
        findings = verify(opened(folder))
        assert findings, f"verify missed bit {bit} in {paths[number].name}"
        assert all(finding.file == str(paths[number]) for finding in findings)
        paths[number].write_bytes(data)
    assert read(folder) == expected
    return counts


@pytest.mark.parametrize("kind", ["tokens", "records"])
@pytest.mark.parametrize(("block_bytes", "num_harmless"), [(4096, {"tokens": 48, "records": 68}), (32 << 10, {})])
def test_every_flip_is_detected_or_harmless(
    tmp_path: Path, kind: str, block_bytes: int, num_harmless: dict[str, int]
) -> None:
    """Of the thousand, those that read on all lie in the zeros between header and data, where blocks are so small that
    these fill one alone; with blocks of the usual size none do. ``verify`` finds them all."""
    if kind == "tokens":
        write_tokens(tmp_path, documents(50), block_bytes=block_bytes)
    else:
        write_records(tmp_path, records(30), block_bytes=block_bytes)
    total = sum(path.stat().st_size for path in tmp_path.iterdir())
    bits = np.random.default_rng(5).choice(total * 8, NUM_FLIPS, replace=False)
    counts = sweep(tmp_path, read_tokens if kind == "tokens" else read_records, bits.tolist())
    harmless = num_harmless.get(kind, 0)
    assert counts == Counter({"detected on reading": NUM_FLIPS - harmless, "harmless": harmless})
    assert harmless == (in_zeros(tmp_path, bits // 8) if block_bytes == DATA_OFFSET else 0)


def in_zeros(folder: Path, at: Any) -> int:
    """How many of these bytes, counted through all files, lie between the header and the data of a shard."""
    count, start = 0, 0
    for path in sorted(folder.iterdir()):
        if path.suffix == SUFFIX:
            count += int(((at >= start + HEADER_BYTES) & (at < start + DATA_OFFSET)).sum())
        start += path.stat().st_size
    return count


def test_a_flip_in_bytes_that_no_reader_needs_is_harmless_and_still_found(tmp_path: Path) -> None:
    """Tokens need no notes: a shard whose notes fill blocks of their own reads on, with the values as they were."""
    write_tokens(tmp_path, documents(5), shard_bytes=1 << 20, build="b" * 9000)
    (shard,) = tmp_path.glob("*.crs")
    inside = shard.read_bytes().index(b"b" * 9000) + 4500
    start = (tmp_path / "dataset.json").stat().st_size + inside
    counts = sweep(tmp_path, read_tokens, [start * 8, start * 8 + 7])
    assert counts == {"harmless": 2}
