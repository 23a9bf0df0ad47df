"""What is saved is everything, and what does not belong together is refused in a sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from closeranks.checkpoint.load.resharding_reader import open_newest
from closeranks.checkpoint.weights.checkpoint_weights import CheckpointWeights
from closeranks.core.errors import CheckpointError
from closeranks.parallel.apply import whole_tensors
from closeranks.run.components.model import load_model
from closeranks.run.job.job import load_job
from closeranks.run.loop import train_job
from tests.run.saved import tensors, tree, write
from tests.run.small import dataset, net, open_session, train

pytestmark = pytest.mark.usefixtures("alone")


@pytest.fixture
def saved(tmp_path: Path, alone: None) -> Path:
    train(tmp_path / "saved")
    return tmp_path / "saved"


def narrow() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def deep() -> nn.Module:
    return nn.Sequential(*net(), nn.Tanh(), nn.Linear(2, 2))


FOREIGN: dict[str, tuple[dict[str, Any], str]] = {
    "seed": ({"run": {"seed": 5}}, r"another run\.seed: 0, not 5\. Set run\.seed back, or start a new run"),
    "global batch": (
        {"train": {"global_batch": 16}},
        r"another train\.global_batch: 8, not 16\. Set train\.global_batch back",
    ),
    "precision": ({"train": {"precision": "bf16"}}, r"another train\.precision: 'float32', not 'bf16'"),
    "data": ({"data": dataset(65)}, r"other data: .*64 samples.*not .*65 samples"),
    "width": ({"model": narrow}, r"'0\.weight' has shape \(6, 4\) here and \(8, 4\) in the saved state\. Resume with"),
    "depth": ({"model": deep}, r"2 tensors do not match, such as '4\.bias'\. Resume with the model"),
    "optimizer": ({"optim": {"name": "sgd"}}, r"the saved optimizer is 'adamw', the job's is 'sgd'\. Set optim\.name"),
    "frozen": (
        {"optim": {"groups": [{"pattern": "0.*", "frozen": True}]}},
        r"only the saved optimizer has the trainable parameter '0\.bias'\. Use the model and the frozen groups",
    ),
}


@pytest.mark.parametrize("what", FOREIGN)
def test_a_state_of_another_run_is_refused(saved: Path, tmp_path: Path, what: str) -> None:
    changes, sentence = FOREIGN[what]
    with pytest.raises(CheckpointError, match=sentence):
        open_session(tmp_path / "new", checkpoint={"resume": str(saved)}, **changes)


def shuffled(folder: Path, shuffle: str, resume: str = "") -> None:
    tables = {
        "run": {"folder": str(folder)},
        "model": {"name": "pairs"},
        "data": {"name": "pairs", "num_samples": 32, "eval_fraction": 0.0, "shuffle": shuffle},
        "train": {"steps": 1, "global_batch": 4},
        "checkpoint": {"resume": resume},
    }
    train_job(load_job(None, extra=tables).value)


def test_another_order_is_told_in_the_words_of_the_job(tmp_path: Path) -> None:
    shuffled(tmp_path / "saved", "full")
    sentence = r"another data\.shuffle: 'full', not 'blocks'\. Set data\.shuffle back, or start a new run"
    with pytest.raises(CheckpointError, match=sentence):
        shuffled(tmp_path / "new", "blocks", str(tmp_path / "saved"))


def test_what_may_change_between_runs_is_let_pass(saved: Path, tmp_path: Path) -> None:
    """How long, how fast, in what portions and how often it is looked at."""
    changes: dict[str, Any] = {
        "train": {"steps": 6, "micro_batch": 2, "eval_every": 1},
        "optim": {"lr": 1e-3},
        "telemetry": {"log_every": 1},
    }
    assert train(tmp_path / "new", checkpoint={"resume": str(saved)}, **changes).steps == 6


def test_the_tree_holds_all_that_a_resumed_run_needs(saved: Path) -> None:
    held = tree(saved)
    plain = {"data", "usage", "progress", "schedule", "random", "identity", "algorithm", "config", "versions"}
    assert set(held) == {*plain, "rhythm"}
    assert held["progress"] == {"step": 4, "position": 32}
    assert held["identity"]["seed"] == held["random"]["seed"] == 0
    assert held["config"]["optim"]["lr"] == 1e-2
    assert held["versions"]["torch"] == torch.__version__
    names = set(net().state_dict())
    assert set(tensors(saved, "model")) == names
    assert set(tensors(saved, "optimizer")) == {
        f"{name}/{key}" for name in names for key in ("step", "exp_avg", "exp_avg_sq")
    }


def test_a_file_of_another_kind_is_refused_by_name(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "noise").write_bytes(b"not a state")
    with pytest.raises(CheckpointError, match="noise"):
        open_session(tmp_path / "new", checkpoint={"resume": str(tmp_path / "noise")})


class Buffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


def test_tied_weights_are_kept_once_and_buffers_with_them(tmp_path: Path) -> None:
    module = Buffers()
    names = set(dict(whole_tensors(module)))
    assert names == {
        *("embed.weight", "norm.weight", "norm.bias"),
        *("norm.running_mean", "norm.running_var", "norm.num_batches_tracked"),
    }
    other = Buffers()
    load_model(other, held({name: tensor + 1 for name, tensor in whole_tensors(module)}, tmp_path))
    assert torch.equal(other.head.weight, module.embed.weight + 1)
    assert other.head.weight is other.embed.weight
    assert int(other.norm.num_batches_tracked) == 1


def test_loading_writes_into_the_tensors_the_optimizer_holds(tmp_path: Path) -> None:
    module = net()
    weight = module[0].weight
    load_model(module, held({name: torch.zeros_like(one) for name, one in module.state_dict().items()}, tmp_path))
    assert module[0].weight is weight
    assert not weight.any()


def held(tensors: dict[str, Tensor], place: Path) -> CheckpointWeights:
    """These weights, through a checkpoint."""
    write(place, {"model": tensors}, {}, 0)
    return CheckpointWeights(open_newest(str(place)))
