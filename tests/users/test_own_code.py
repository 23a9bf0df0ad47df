"""What a new user does with models, losses and hooks of their own, in Python."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import closeranks
from closeranks import Hook, Loss, Session
from closeranks.core.events import Evaluated, StepDone
from tests.cli.commands import closeranks as command

Batch = dict[str, Tensor]
X = torch.randn(240, 8, generator=torch.Generator().manual_seed(0))
Y = (X.sum(1) > 0).long()
DATA, HELD_OUT = TensorDataset(X[:200], Y[:200]), TensorDataset(X[200:], Y[200:])
QUIET = {"report": False}


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


def counted(model: nn.Module, batch: Batch) -> Loss:
    answers = model(batch["x"])
    total = nn.functional.cross_entropy(answers, batch["y"], reduction="sum")
    correct = (answers.argmax(1) == batch["y"]).sum()
    return Loss(total, weight=float(len(batch["y"])), metrics={"accuracy": correct})


def test_freeze_layers() -> None:
    """docs/models.md: parameter groups. A frozen layer keeps its weights to the bit; the others learn."""
    model = net()
    first, last = model[0].weight.detach().clone(), model[2].weight.detach().clone()
    optim = {"lr": 1e-2, "groups": [{"pattern": "0.*", "frozen": True}]}
    closeranks.train(model, DATA, loss, train={"steps": 10, "global_batch": 16}, optim=optim, telemetry=QUIET)
    assert torch.equal(model[0].weight, first)
    assert not torch.equal(model[2].weight, last)


def test_a_metric_and_the_best_checkpoint() -> None:
    """docs/models.md, docs/checkpoints.md: a metric is named, evaluations report it, the best state is kept."""
    result = closeranks.train(
        net, DATA, counted, eval_data=HELD_OUT, metrics=["accuracy"],
        train={"steps": 30, "global_batch": 20, "eval_every": 10}, optim={"lr": 3e-2},
        checkpoint={"keep_best": 1, "every": 10}, run={"folder": "runs/best"}, telemetry=QUIET,
    )  # fmt: skip
    assert result.eval is not None
    assert result.eval.metrics["accuracy"] > 0.8
    listed = command("ckpt", "ls", "runs/best", cwd=Path.cwd())
    assert f"{result.eval.loss:.6g}" in listed.out, listed.out  # the column "metric": smaller is better


class Diary(Hook):
    """Writes a line for every step into a file of the run folder, on the rank that may speak."""

    def on_step(self, session: Session, step: StepDone) -> None:
        if session.world.is_lead:
            with (session.folder / "diary.jsonl").open("a") as diary:
                diary.write(json.dumps({"step": step.step, "loss": step.loss}) + "\n")

    def on_eval(self, session: Session, result: Evaluated) -> None:
        if session.world.is_lead:
            (session.folder / "eval.txt").write_text(f"{result.loss:.4f}")


def test_a_hook_that_logs_to_a_file() -> None:
    """docs/python.md: hooks."""
    sizes = {"steps": 6, "global_batch": 20}
    result = closeranks.train(net, DATA, loss, eval_data=HELD_OUT, hooks=[Diary()], train=sizes, telemetry=QUIET)
    lines = [json.loads(line) for line in (result.folder / "diary.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert lines[-1]["loss"] == result.loss
    assert float((result.folder / "eval.txt").read_text()) > 0


def test_epochs_and_two_more_times() -> None:
    """docs/runs.md: resuming. A run by epochs is continued to more of them, with a last step that is short."""
    tables = {"run": {"folder": "runs/epochs"}, "telemetry": QUIET}
    short = TensorDataset(X[:50], Y[:50])  # 50 samples in steps of 16: an epoch ends inside a step
    assert closeranks.train(net, short, loss, train={"epochs": 1, "global_batch": 16}, **tables).steps == 4
    for epochs in (2, 3):
        more = {"epochs": epochs, "global_batch": 16}
        result = closeranks.train(net, short, loss, train=more, checkpoint={"resume": "runs/epochs"}, **tables)
        assert result.reason == "finished"
        assert result.steps == 4 * epochs


GPT2 = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 64, "n_positions": 16}


def test_a_hugging_face_gpt2() -> None:
    """docs/models.md: any module. A transformers model is one; nothing is downloaded."""
    transformers = pytest.importorskip("transformers")

    def gpt2() -> nn.Module:
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2, use_cache=False))

    def next_token(model: nn.Module, batch: Batch) -> Tensor:
        out: Tensor = model(input_ids=batch["x"], labels=batch["x"]).loss
        return out

    tokens = torch.arange(16).repeat(32, 1) + torch.arange(32)[:, None]
    result = closeranks.train(
        gpt2, tokens, next_token, train={"steps": 40, "global_batch": 8}, optim={"lr": 1e-2}, telemetry=QUIET
    )
    assert result.loss < 2.0  # ln 64 = 4.2 at the start
