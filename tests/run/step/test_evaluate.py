"""An evaluation does not depend on the number of workers, and leaves no trace in training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from closeranks.core.events import Evaluated, StepDone
from closeranks.testing import run_world
from tests.run.saved import tensors
from tests.run.small import counted, dataset, of_kind, open_session, train

pytestmark = pytest.mark.usefixtures("alone")


def noisy() -> nn.Module:
    """Dropout and batch norm: what evaluation must switch off, and draw nothing from."""
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))


NOISY: dict[str, Any] = {"model": noisy, "loss": counted, "metrics": ["accuracy"]}


def test_evaluating_leaves_training_bit_identical(tmp_path: Path) -> None:
    held_out = dataset(30, seed=1)
    with_it = train(tmp_path / "with", eval_data=held_out, train={"steps": 6, "eval_every": 1}, **NOISY)
    train(tmp_path / "without", train={"steps": 6}, **NOISY)
    told = [[done.loss for done in of_kind(tmp_path / name, StepDone)] for name in ("with", "without")]
    assert told[0] == told[1]
    assert len(of_kind(tmp_path / "with", Evaluated)) == 6
    left, right = (tensors(tmp_path / name, "model") for name in ("with", "without"))
    assert all(torch.equal(left[name], right[name]) for name in left)
    assert with_it.eval is not None
    assert with_it.eval.weight == 30


def test_it_is_what_the_model_says_of_the_whole_held_out_set(tmp_path: Path) -> None:
    """Five does not divide 23: the last portion is short, and counts by its samples."""
    held_out = dataset(23, seed=1)
    session = open_session(tmp_path, eval_data=held_out, train={"micro_batch": 5, "global_batch": 10}, **NOISY)
    with session:
        result = session.evaluate()
        session.model.eval()
        x, y = held_out.tensors
        with torch.no_grad():
            answers = session.model(x)
    assert result.weight == 23
    assert result.loss == pytest.approx(nn.functional.cross_entropy(answers, y).item(), rel=1e-5)
    assert result.metrics["accuracy"] == pytest.approx((answers.argmax(1) == y).double().mean().item())


def test_no_more_samples_are_looked_at_than_asked_for(tmp_path: Path) -> None:
    result = train(tmp_path, eval_data=dataset(23, seed=1), train={"eval_samples": 10})
    assert result.eval is not None
    assert result.eval.weight == 10


def test_a_part_that_the_user_put_to_rest_stays_at_rest(tmp_path: Path) -> None:
    session = open_session(tmp_path, eval_data=dataset(seed=1), **NOISY)
    for step in session:
        session.model[1].eval()
        session.evaluate()
        assert [part.training for part in session.model] == [True, False, True, True]
        for batch in step:
            step.backward(session.loss(batch))


def test_modes_come_back_when_the_evaluation_fails(tmp_path: Path) -> None:
    def broken(model: nn.Module, batch: dict[str, torch.Tensor]) -> Any:
        if not model.training:
            raise RuntimeError("no")
        return counted(model, batch)

    with open_session(tmp_path, eval_data=dataset(seed=1), **{**NOISY, "loss": broken}) as session:
        session.model.train()
        with pytest.raises(RuntimeError, match="no"):
            session.evaluate()
        assert all(part.training for part in session.model.modules())


class Told(Dataset[dict[str, Any]]):
    """Samples with more in them than tensors."""

    def __init__(self) -> None:
        self._rows = dataset()

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        x, y = self._rows[index]
        return {"x": x, "y": y, "name": f"sample {index}", "pair": (x, x)}


def test_what_trains_can_be_evaluated_whatever_else_a_batch_holds(tmp_path: Path) -> None:
    result = train(tmp_path, data=Told(), eval_data=Told())
    assert result.eval is not None
    assert result.eval.weight == 64


def evaluated(folder: Path) -> tuple[float, float, float]:
    """Before training, so that only the evaluation can differ. 23 samples by 5: five portions for the ranks."""
    table = {"global_batch": 15, "micro_batch": 5}
    with open_session(folder, eval_data=dataset(23, seed=1), train=table, **NOISY) as session:
        result = session.evaluate()
    return result.loss, result.weight, result.metrics["accuracy"]


@pytest.mark.world
def test_any_number_of_workers_comes_to_the_same_figures(tmp_path: Path) -> None:
    expected = evaluated(tmp_path / "one")
    results = run_world(evaluated, 3, tmp_path / "three")
    assert results[0] == results[1] == results[2]
    assert results[0] == pytest.approx(expected, rel=1e-12)
    assert expected[1] == 23
