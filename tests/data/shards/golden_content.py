"""What the golden data sets hold, and how they were written (once; a later version must still read them).

python -m tests.data.shards.golden_content FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from closeranks.data.shards.manifest import DatasetInfo
from closeranks.data.shards.writer import RecordShardWriter, TokenShardWriter

GOLDEN = Path(__file__).parent / "golden"
VOCAB_SIZE = 500


def documents() -> list[list[int]]:
    return [[(7 * i + 3 * j * j) % VOCAB_SIZE for j in range(11 * i % 97)] for i in range(40)]


def records() -> list[dict[str, Any]]:
    """Every kind of value, and every dtype."""
    dtypes = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
    dtypes += ("float16", "float32", "float64", "complex64", "complex128")
    table: list[dict[str, Any]] = [
        {f"array of {dtype}": (np.arange(6) % 5).reshape(2, 3).astype(dtype), "number": n}
        for n, dtype in enumerate(dtypes)
    ]
    table += [{}, {"none": None, "true": True, "false": False, "int": -(2**63), "float": -0.1}]
    table += [{"text": "Grüße, 世界", "empty": "", "bytes": bytes(range(256)), "no bytes": b""}]
    table += [{"json": {"a": [1, 2.5, None, True, "ü"], "b": {}}, "large": 2**70, "scalar": np.array(3.5)}]
    table += [{"no rows": np.zeros((0, 4), np.float32), "text": "x" * i, "cls": i} for i in range(20)]
    return table


def write(folder: Path) -> None:
    settings: dict[str, Any] = {"build": "golden", "shard_bytes": 2000, "block_bytes": 4096}
    with TokenShardWriter(folder / "tokens", "uint16", vocab_size=VOCAB_SIZE, **settings) as tokens:
        for number, document in enumerate(documents()):
            tokens.append(document, cursor=number + 1)
        tokens.finish_and_commit(
            DatasetInfo(VOCAB_SIZE, "golden", "ab" * 32, {"inputs": ["documents()"], "settings": {"n": 40}})
        )
    with RecordShardWriter(folder / "records", **settings) as rows:
        for number, record in enumerate(records()):
            rows.append(record, cursor={"file": "records()", "line": number + 1})
        rows.finish_and_commit(DatasetInfo(provenance={"inputs": ["records()"]}))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
