"""What a new user does with data of their own: sentences of unequal length, JSONL, TFRecord."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch import Tensor

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
