"""What a new user does with data of their own: sentences of unequal length, JSONL, TFRecord."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path

import pytest
import torch
from crc32c import crc32c
from torch import Tensor, nn

import closeranks
from closeranks import load_job, train_job
from tests.cli.commands import closeranks as command

Batch = dict[str, Tensor]


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))  # as python does with the folder of a script


def test_own_jsonl_built_and_trained() -> None:
    """docs/data.md: from text to a run."""
    lines = [json.dumps({"text": f"the {n}th line of a book that counts to {n}. " * 4}) for n in range(40)]
    Path("book.jsonl").write_text("\n".join(lines) + "\n")
    built = command("data", "build", "book.jsonl", "--out", "corpus", cwd=Path.cwd())
    assert built.code == 0, built.err
    Path("job.toml").write_text("""
[model]
name = "llama"
preset = "tiny"
num_layers = 1
[data]
name = "tokens"
path = "corpus"
seq_len = 32
eval_fraction = 0.1
[train]
steps = 8
global_batch = 8
[optim]
lr = 1e-2
[telemetry]
report = false
""")
    result = train_job(load_job(Path("job.toml")).value)
    assert result.steps == 8
    assert result.eval is not None
    assert result.eval.loss < 5.6  # ln 256 at the start


def pad(samples: list[tuple[Tensor, int]]) -> Batch:
    """Sentences of a micro-batch, filled up with zeros to the longest of them."""
    ids = nn.utils.rnn.pad_sequence([ids for ids, _ in samples], batch_first=True)
    return {"ids": ids, "label": torch.tensor([label for _, label in samples])}


class Sentences(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Each of its own length; the label says which half of the alphabet its words are of."""

    def __len__(self) -> int:
        return 120

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        label = index % 2
        return torch.arange(3 + index % 7) % 10 + 1 + 10 * label, label


def mean_of_words() -> nn.Module:
    return nn.Sequential(nn.EmbeddingBag(21, 8, padding_idx=0), nn.Linear(8, 2))


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(model(batch["ids"]), batch["label"])


@pytest.mark.parametrize("global_batch", [8, 16])
def test_samples_of_unequal_length(global_batch: int) -> None:
    """docs/data-samples.md: a dataset of your own. A collate function pads; the batch may have any size."""
    sizes = {"steps": 30, "global_batch": global_batch}
    quiet = {"report": False}
    result = closeranks.train(
        mean_of_words, Sentences(), loss, collate=pad, train=sizes, optim={"lr": 0.1}, telemetry=quiet
    )
    assert result.loss < 0.2  # ln 2 = 0.69 at the start


def _message(number: int, data: bytes) -> bytes:
    """A field of a protocol buffer that holds another message; these are all shorter than 128 bytes."""
    return bytes([number << 3 | 2, len(data)]) + data


def _example(features: list[float], label: int) -> bytes:
    """A ``tf.train.Example``, as TensorFlow would have written it."""
    numbers = _message(2, _message(1, struct.pack(f"<{len(features)}f", *features)))
    whole = _message(3, _message(1, bytes([label])))
    entries = [_message(1, _message(1, name) + _message(2, value)) for name, value in ((b"x", numbers), (b"y", whole))]
    return _message(1, b"".join(entries))


def _record(data: bytes) -> bytes:
    def masked(part: bytes) -> bytes:
        crc = crc32c(part)
        return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)

    length = struct.pack("<Q", len(data))
    return length + masked(length) + data + masked(data)


NET = """
from torch import nn

def net():
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))

def loss(model, batch):
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])
"""


def test_tfrecord_files_read_in_place() -> None:
    """docs/data-formats.md: TFRecord. Files of TensorFlow's are trained on as they lie, without TensorFlow."""
    rng = random.Random(0)
    rows = [[rng.uniform(-1, 1) for _ in range(4)] for _ in range(100)]
    Path("train.tfrecord").write_bytes(b"".join(_record(_example(row, int(sum(row) > 0))) for row in rows))
    Path("tfnet.py").write_text(NET)
    Path("job.toml").write_text("""
[model]
name = "tfnet:net"
loss = "tfnet:loss"
[data]
name = "records"
path = "train.tfrecord"
[train]
steps = 40
global_batch = 20
[optim]
lr = 3e-2
[telemetry]
report = false
""")
    assert command("data", "verify", "train.tfrecord", cwd=Path.cwd()).code == 0
    assert train_job(load_job(Path("job.toml")).value).loss < 0.5
