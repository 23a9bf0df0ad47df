"""Small data sets whose content is known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from closeranks.data.files.open import open_files
from closeranks.data.files.protocol import Files
from closeranks.data.shards.manifest import DatasetInfo, DatasetManifest
from closeranks.data.shards.writer import RecordShardWriter, TokenShardWriter

VOCAB_SIZE = 1000


def documents(num: int = 60, seed: int = 0) -> list[npt.NDArray[Any]]:
    """Some are empty, some longer than a small shard's block."""
    rng = np.random.default_rng(seed)
    lengths = [*rng.integers(0, 300, num - 2).tolist(), 0, 5000]
    return [rng.integers(0, VOCAB_SIZE, length).astype(np.uint16) for length in lengths]


def records(num: int = 40, seed: int = 0) -> list[dict[str, Any]]:
    """Several forms, and every kind of value."""
    rng = np.random.default_rng(seed)
    return [_record(rng, number) for number in range(num)]


def _record(rng: np.random.Generator, number: int) -> dict[str, Any]:
    record: dict[str, Any] = {
        "jpg": rng.bytes(int(rng.integers(0, 900))),
        "cls": number,
        "x": rng.normal(size=(int(rng.integers(0, 5)), 7)).astype(np.float32),
    }
    if number % 3 == 0:
        record |= {"text": f"número {number}", "weight": number / 7, "is_odd": bool(number % 2)}
    if number % 4 == 0:
        record |= {"meta": {"tags": ["a", number, None], "box": [0.5, 1]}, "nothing": None, "mask": np.ones((3,), bool)}
    return record


def write_tokens(folder: Path, docs: Sequence[npt.ArrayLike], **settings: Any) -> DatasetManifest:
    settings = {"shard_bytes": 12_000, "block_bytes": 4096, "vocab_size": VOCAB_SIZE, **settings}
    with TokenShardWriter(folder, settings.pop("dtype", "uint16"), **settings) as writer:
        for number, tokens in enumerate(docs):
            writer.append(tokens, cursor=number + 1)
        return writer.finish_and_commit(DatasetInfo(settings["vocab_size"], "words", "ab" * 32, {"from": "made up"}))


def write_records(folder: Path, rows: Sequence[Mapping[str, Any]], **settings: Any) -> DatasetManifest:
    settings = {"shard_bytes": 12_000, "block_bytes": 4096, **settings}
    with RecordShardWriter(folder, **settings) as writer:
        for number, record in enumerate(rows):
            writer.append(record, cursor=number + 1)
        return writer.finish_and_commit(DatasetInfo(provenance={"from": "made up"}))


def opened(folder: Path) -> Files:
    return open_files(str(folder))


def same(a: Any, b: Any) -> bool:
    """Equal in value and in type; arrays in dtype and shape too, NaN like NaN."""
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and (a.dtype, a.shape) == (b.dtype, b.shape) and a.tobytes() == b.tobytes()
    if isinstance(a, Mapping):
        return isinstance(b, Mapping) and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return isinstance(b, list) and len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and (a == b or (a != a and b != b))


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
