"""How were the files of this folder made? By the tools that own their formats, never by closeranks.

Run in an environment of its own with megatron-core, mosaicml-streaming and pillow (``python make.py``), and compare the
result before it replaces what is here. ``expected.json`` beside each set says what the tool was given.
"""

import json
import shutil
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from PIL import Image
from streaming.base.format.mds.writer import MDSWriter

HERE = Path(__file__).parent


def fresh(name: str) -> Path:
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def write_megatron(prefix: Path, documents: list[list[list[int]]], dtype: type, multimodal: bool = False) -> None:
    """Documents of sequences of tokens."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype, multimodal=multimodal)
    for document in documents:
        for number, sequence in enumerate(document):
            builder.add_item(torch.tensor(sequence, dtype=torch.int64), mode=number % 2)
        builder.end_document()
    builder.finalize(f"{prefix}.idx")


def flat(documents: list[list[list[int]]]) -> list[list[int]]:
    """Documents of tokens, whatever sequences they were written in."""
    return [[*chain.from_iterable(document)] for document in documents]


def make_megatron() -> None:
    rng = np.random.default_rng(5)
    draw = lambda *sizes: [rng.integers(0, 60000, size).tolist() for size in sizes]  # noqa: E731
    two = fresh("megatron/two")
    first, second = [draw(7), draw(3, 4), [], draw(1), draw(50)], [draw(20, 1, 1), draw(9)]
    write_megatron(two / "a_text_document", first, np.uint16)
    write_megatron(two / "b_text_document", second, np.uint16)
    (two / "expected.json").write_text(json.dumps({"documents": flat(first + second)}))
    wide, documents = fresh("megatron/int32"), [draw(12), draw(5, 6)]
    write_megatron(wide / "corpus", documents, np.int32)
    (wide / "expected.json").write_text(json.dumps({"documents": flat(documents)}))
    write_megatron(fresh("megatron/multimodal") / "corpus", documents, np.int32, multimodal=True)


COLUMNS = {
    "array_any": "ndarray",
    "array_fixed": "ndarray:int16:2,3",
    "array_typed": "ndarray:float32",
    "blob": "bytes",
    "caption": "str",
    "drawn": "png",
    "f16": "float16",
    "f64": "float64",
    "i8": "int8",
    "label": "int",
    "meta": "json",
    "photo": "jpeg",
    "photos": "list[jpeg]",
    "raw": "pil",
    "s_decimal": "str_decimal",
    "s_float": "str_float",
    "s_int": "str_int",
    "u8": "uint8",
    "u64": "uint64",
}


def mds_sample(number: int, rng: np.random.Generator) -> dict[str, object]:
    from decimal import Decimal

    pixels = rng.integers(0, 255, (4, 6, 3), np.uint8)
    image = Image.fromarray(pixels)
    return {
        "array_any": rng.integers(0, 9, (2, number % 3 + 1)).astype([np.uint8, np.int64, np.float16][number % 3]),
        "array_fixed": rng.integers(-9, 9, (2, 3)).astype(np.int16),
        "array_typed": rng.random((number % 4 + 1,)).astype(np.float32),
        "blob": bytes(rng.integers(0, 255, number % 5, np.uint8)),
        "caption": f"sample {number}: ünïcode",
        "drawn": image,
        "f16": np.float16(number / 4),
        "f64": np.float64(number / 3),
        "i8": np.int8(-number),
        "label": number * 1_000_000_007,
        "meta": {"n": number, "tags": ["a", None, 1.5]},
        "photo": image,
        "photos": [image] * (number % 3),
        "raw": Image.fromarray(pixels[:, :, 0]) if number % 2 else image,
        "s_decimal": Decimal("1.00000000000000000001") + number,
        "s_float": number / 7,
        "s_int": number * 10**30,
        "u8": np.uint8(number),
        "u64": np.uint64(2**63 + number),
    }


def plain(name: str, value: object) -> object:
    """A value as JSON: what a reader must give back."""
    if isinstance(value, Image.Image):
        array = np.asarray(value)
        return None if name == "photo" else {"dtype": str(array.dtype), "values": array.tolist()}
    if isinstance(value, np.ndarray):
        return {"dtype": str(value.dtype), "values": value.tolist()}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, bytes):
        return value.hex()
    if name == "photos":
        return len(value)  # type: ignore[arg-type]
    return str(value) if name == "s_decimal" else value


def make_mds() -> None:
    rng = np.random.default_rng(6)
    samples = [mds_sample(number, rng) for number in range(12)]
    folder = fresh("mds/all")
    with MDSWriter(columns=COLUMNS, out=str(folder), hashes=["sha1", "xxh64"], size_limit=6000, exist_ok=True) as out:
        for sample in samples:
            out.write(sample)
    expected = [{name: plain(name, value) for name, value in sample.items()} for sample in samples]
    (folder / "expected.json").write_text(json.dumps(expected))
    few = {"caption": "str", "label": "int"}
    for name, settings in {"zstd": {"compression": "zstd"}, "pickled": {}}.items():
        columns = few if name == "zstd" else {**few, "thing": "pkl"}
        with MDSWriter(columns=columns, out=str(fresh(f"mds/{name}")), exist_ok=True, **settings) as out:
            for number in range(3):
                out.write({"caption": "x", "label": number, "thing": {"n": number}})


if __name__ == "__main__":
    make_megatron()
    make_mds()
