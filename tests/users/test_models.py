"""What a new user does with larger models of their own: a vision transformer on two workers, a Llama from elsewhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.cli.commands import closeranks

pytestmark = pytest.mark.world
VIT = """
import torch
from sklearn.datasets import load_digits
from torch import nn
import closeranks


class ViT(nn.Module):
    def __init__(self, dim=32, depth=2):
        super().__init__()
        self.patch = nn.Conv2d(1, dim, kernel_size=2, stride=2)
        self.position = nn.Parameter(torch.randn(1, 16, dim) * 0.02)
        layer = nn.TransformerEncoderLayer(dim, 4, 64, dropout=0.1, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(dim, 10)

    def forward(self, images):
        tokens = self.patch(images).flatten(2).transpose(1, 2) + self.position
        return self.head(self.blocks(tokens).mean(1))


def loss(model, batch):
    answers = model(batch["x"])
    total = nn.functional.cross_entropy(answers, batch["y"], reduction="sum")
    correct = (answers.argmax(1) == batch["y"]).sum()
    return closeranks.Loss(total, float(len(batch["y"])), {"accuracy": correct})


digits = load_digits()
x = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
y = torch.tensor(digits.target)
pair = torch.utils.data.TensorDataset
result = closeranks.train(ViT, pair(x[:1500], y[:1500]), loss, eval_data=pair(x[1500:], y[1500:]),
                          metrics=["accuracy"], train={"steps": 60, "global_batch": 64}, optim={"lr": 5e-3})
"""


def test_an_own_vision_transformer_on_two_workers(tmp_path: Path) -> None:
    """docs/python.md: closeranks run -n 2 script.py, with no line in it about workers."""
    (tmp_path / "vit.py").write_text(VIT)
    done = closeranks("run", "-n", 2, "vit.py", cwd=tmp_path)
    assert done.code == 0, done.err
    assert "on 2 workers" in done.out
    lines = [json.loads(line) for line in (tmp_path / "runs/vit/metrics/rank-00000.jsonl").read_text().splitlines()]
    assert [line for line in lines if line["event"] == "eval"][-1]["metrics"]["accuracy"] > 0.25  # a tenth by chance
    assert (tmp_path / "runs/vit/curve.png").exists()


SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = SHAPE | {"num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 512}


def test_a_llama_from_hugging_face_and_back(tmp_path: Path) -> None:
    """docs/checkpoints-hf.md: import, fine-tune, export, and load with transformers what was trained."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**LLAMA, bos_token_id=1, eos_token_id=2)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "hub")
    imported = closeranks("ckpt", "import-hf", "hub", "runs/llama", cwd=tmp_path)
    assert imported.code == 0, imported.err
    data = ["data.name=text", "data.seq_len=32", "data.max_bytes=20000", "train.steps=6", "train.global_batch=8"]
    quiet = ["telemetry.report=false", "run.folder=runs/tuned", "optim.lr=1e-3"]
    trained = closeranks("train", "runs/llama/job.toml", "-n", 2, *data, *quiet, cwd=tmp_path)
    assert trained.code == 0, trained.err
    exported = closeranks("ckpt", "export-hf", "runs/tuned", "tuned-hf", cwd=tmp_path)
    assert exported.code == 0, exported.err
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "tuned-hf")
    before = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hub")
    assert model.config.hidden_size == 32
    moved = (model.lm_head.weight - before.lm_head.weight).abs().max()
    assert 0 < moved < 0.1
