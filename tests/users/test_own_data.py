"""What a new user does with data of their own: sentences of unequal length, JSONL, TFRecord."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import closeranks
from closeranks import load_job, train_job
from tests.cli.commands import closeranks as command

Batch = dict[str, Tensor]


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


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
