"""Inputs for builds: text of the standard library, and a small tokenizer trained on it."""

from __future__ import annotations

import io
import json
import sysconfig
import tarfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers


def modules(count: int) -> Iterator[tuple[str, str]]:
    """Names and texts of modules of the standard library."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:count]
    assert len(paths) == count
    yield from ((path.name, path.read_text()) for path in paths)


@cache
def _trained() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text for _, text in modules(8)), trainer)
    return tokenizer.to_str()


def tiny_tokenizer(path: Path) -> Path:
    """A byte-level BPE of 600 tokens."""
    path.write_text(_trained())
    return path


def texts_folder(folder: Path, count: int = 12) -> dict[str, str]:
    """A folder of text files, one below another."""
    texts = dict(modules(count))
    for number, (name, text) in enumerate(texts.items()):
        path = folder / ("deep" if number % 3 == 0 else "") / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return texts


@cache
def _words() -> list[str]:
    return " ".join(text for _, text in modules(12)).split()


def rows(count: int) -> list[dict[str, object]]:
    """Records with a text of its own each, some of them not in ASCII."""
    words = _words()
    return [
        {
            "text": " ".join(words[n * 7 % 20_000 : n * 7 % 20_000 + 5 + n % 23]) + " ü€"[: n % 4],
            "id": n,
            "score": n / 4,
        }
        for n in range(count)
    ]


def json_lines(records: list[dict[str, object]]) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def tar_bytes(mode: str, count: int) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:
        for number in range(count):
            for field, content in (("txt", f"text {number}".encode()), ("cls", str(number % 3).encode())):
                info = tarfile.TarInfo(f"a/{number:04d}.{field}")
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def png(seed: int, size: int = 8) -> bytes:
    buffer = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (size, size, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def contents(folder: Path) -> dict[str, bytes]:
    """The data set's files; what a build keeps of itself is hidden."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if not path.name.startswith(".")}
