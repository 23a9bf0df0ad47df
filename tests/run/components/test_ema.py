"""``optim.ema``: training goes on as without it, the average is judged, saved, resumed, resharded and exported."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from closeranks import Session
from closeranks.checkpoint.load.resharding_reader import open_newest
from closeranks.checkpoint.weights.open import open_weights
from closeranks.core.errors import ConfigError
from closeranks.core.events import Evaluated, StepDone
from closeranks.core.pieces import Piece
from closeranks.facts.layout import Layout
from closeranks.optim.ema import decay_at
from closeranks.run.hooks import Hook
from closeranks.run.huggingface.convert import export_hf
from closeranks.run.job.job import load_job
from closeranks.run.loop import run_session
from closeranks.run.sample import sample
from closeranks.testing import run_world
from tests.run.generations import Case, assert_same, run, run_and_die, state
from tests.run.small import dataset, loss, net, open_session

DECAY = 0.7
TABLES: dict[str, dict[str, Any]] = {
    "model": {"name": "llama", "dim": 32, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 64},
    "data": {"name": "text", "seq_len": 16, "max_bytes": 20_000},
    "train": {"global_batch": 6, "micro_batch": 1, "eval_samples": 8, "precision": "float64"},
    "optim": {"lr": 1e-2, "schedule": {"name": "constant", "warmup": 0}, "ema": DECAY},
}


def section(place: Path, name: str) -> dict[str, Tensor]:
    reader = open_newest(str(place))
    return {key: reader.read(name, key, Piece.whole(key, shape)) for key, shape in reader.shapes(name).items()}


class Following(Hook):
    """Computes the average on its own, from the weights after each step."""

    def __init__(self) -> None:
        self.average: dict[str, Tensor] = {}
        self.losses: list[float] = []
        self.judged: list[Evaluated] = []

    def on_start(self, session: Session) -> None:
        self.average = {name: one.detach().clone() for name, one in session.model.named_parameters()}

    def on_step(self, session: Session, step: StepDone) -> None:
        decay = decay_at(step.step, DECAY)
        for name, one in session.model.named_parameters():
            self.average[name] = decay * self.average[name] + (1 - decay) * one.detach()
        self.losses.append(step.loss)

    def on_eval(self, session: Session, result: Evaluated) -> None:
        self.judged.append(result)


def test_training_is_the_same_and_the_average_is_what_is_judged(tmp_path: Path) -> None:
    held_out = dataset(32, seed=9)
    optim, train = {"lr": 0.1}, {"steps": 6, "eval_every": 3, "precision": "float64"}
    plain, averaged = Following(), Following()
    run_session(open_session(tmp_path / "plain", eval_data=held_out, hooks=[plain], optim=optim, train=train))
    run_session(
        open_session(tmp_path / "ema", eval_data=held_out, hooks=[averaged], optim={**optim, "ema": DECAY}, train=train)
    )
    assert averaged.losses == plain.losses
    model = net().double()
    model.load_state_dict(averaged.average)
    batch = {"x": held_out.tensors[0].double(), "y": held_out.tensors[1]}
    assert averaged.judged[-1].loss == pytest.approx(loss(model, batch).item(), rel=1e-12)
    assert abs(averaged.judged[-1].loss - plain.judged[-1].loss) > 1e-6
    for name, one in section(tmp_path / "ema", "ema").items():
        torch.testing.assert_close(one, averaged.average[name], rtol=1e-13, atol=0)
    weights, before = section(tmp_path / "ema", "model"), section(tmp_path / "plain", "model")
    assert all(torch.equal(weights[name], before[name]) for name in before)


def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    tables = {"optim": {"ema": DECAY, "schedule": {"name": "constant"}}}
    run_session(open_session(tmp_path / "whole", **tables, train={"steps": 6}))
    run_session(open_session(tmp_path / "first", **tables, train={"steps": 3}))
    resume = {"resume": str(tmp_path / "first")}
    run_session(open_session(tmp_path / "second", **tables, train={"steps": 6}, checkpoint=resume))
    whole, second = section(tmp_path / "whole", "ema"), section(tmp_path / "second", "ema")
    assert whole.keys() == second.keys()
    assert all(torch.equal(whole[name], second[name]) for name in whole)


def test_a_run_that_had_none_begins_with_its_weights(tmp_path: Path) -> None:
    run_session(open_session(tmp_path / "first", train={"steps": 3}))
    start = section(tmp_path / "first", "model")
    resumed = open_session(
        tmp_path / "second", train={"steps": 4}, optim={"ema": DECAY}, checkpoint={"resume": str(tmp_path / "first")}
    )
    run_session(resumed)
    end, average = section(tmp_path / "second", "model"), section(tmp_path / "second", "ema")
    decay = decay_at(4, DECAY)
    for name in start:
        torch.testing.assert_close(average[name], decay * start[name] + (1 - decay) * end[name])


def go(folder: Path, text: str) -> float:
    torch.set_num_threads(1)
    tables = {**TABLES, "train": {**TABLES["train"], "steps": 4}, "layout": asdict(Layout.parse(text))}
    result = run_session(Session.from_job(load_job(None, extra=tables).value, folder))
    assert result.eval is not None
    return result.eval.loss


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    place = tmp_path_factory.mktemp("alone") / "run"
    (judged,) = run_world(go, 1, place, "data=1", timeout_s=300)
    return place, judged


@pytest.mark.world
@pytest.mark.parametrize("layout", ["data=2 zero=1", "data=2 zero=2", "data=2 zero=3", "data=1 tensor=2 pipeline=2"])
def test_every_layout_keeps_and_judges_the_same_average(tmp_path: Path, alone: tuple[Path, float], layout: str) -> None:
    place, expected = alone
    judged = run_world(go, Layout.parse(layout).num_ranks, tmp_path / "run", layout, timeout_s=300)
    assert judged[0] == pytest.approx(expected, rel=1e-9)
    one, other = section(place, "ema"), section(tmp_path / "run", "ema")
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(other[name], one[name], rtol=1e-9, atol=1e-12)


@pytest.mark.world
def test_what_is_exported_and_sampled_is_the_average(tmp_path: Path, alone: tuple[Path, float]) -> None:
    place, _ = alone
    average = section(place, "ema")
    moved = export_hf(str(place), tmp_path / "hf", shard_bytes=1 << 30)
    assert any("moving average" in note for note in moved.notes)
    for source in (str(tmp_path / "hf"), str(place)):
        weights = open_weights(source)
        for name, shape in weights.names().items():
            assert torch.equal(weights.read(name, Piece.whole(name, shape)), average[name])
    assert b"".join(sample(place, "def ", num_tokens=4, temperature=0.0, top_k=0, seed=0))


@pytest.mark.world
def test_a_killed_worker_costs_no_bit_of_it(tmp_path: Path) -> None:
    tables = {"optim": {"ema": DECAY}, "elastic": {"snapshot_every": 1}, "checkpoint": {"save": False}}
    whole = Case(tmp_path / "whole", "data=2 zero=2", tables=tables, steps=5)
    struck = Case(tmp_path / "struck", "data=2 zero=2", tables=tables, steps=5, deaths=((1, "step:3"),))
    run(whole)
    run_and_die(struck)
    run(replace(struck, generation=1, deaths=()))
    assert_same(whole, struck)
    assert any(name.startswith("ema/") for name in state(whole, 0))


def test_replicas_that_train_apart_have_no_common_average() -> None:
    with pytest.raises(ConfigError, match=r"optim\.ema"):
        load_job(None, extra={**TABLES, "train": {**TABLES["train"], "steps": 4}, "sync": {"local": {"every": 2}}})
