"""A pipeline in a user's own loop, and losses and tables that do not fit a layout: one sentence each, on every rank."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from closeranks import Session
from closeranks.core.errors import CloseranksError, ModelError, UserError
from closeranks.run.job.job import check_workers, load_job
from closeranks.run.step.evaluate import num_pipelined_micro_batches
from closeranks.run.step.step import Step
from closeranks.testing import run_world
from closeranks.testing.world import WorldError
from tests.run import own_models
from tests.run.test_own_modules import STAGES, tables_of


def penalty(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Before the model is called, so that every stage comes to it."""
    size = sum((p.square().sum() for p in model.parameters()), torch.zeros(()))
    return own_models.loss(model, batch) + 1e-3 * size


def penalty_alone(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """A number of shards alone, behind a forward."""
    own_models.loss(model, batch)
    return sum(p.square().sum() for p in model.parameters())  # type: ignore[return-value]


class Counting(own_models.Mixer):
    """Counts on all of its hidden columns."""

    def forward(self, hidden: Tensor) -> Tensor:
        inner = self.up(self.norm(hidden)).view(*hidden.shape[:-1], 4, 5).tanh()
        return hidden + self.down(inner.flatten(-2))


def counting() -> nn.Module:
    net = own_models.Net()
    net.blocks[1] = Counting(12, 20, 0.0)
    return net


PAIR = [{"pattern": "blocks.*.up.weight", "dim": 0}, {"pattern": "blocks.*.down.weight", "dim": 1}]


def train(folder: Path, text: str, model: dict[str, Any], action: str) -> None:
    torch.set_num_threads(1)
    with Session.from_job(load_job(None, extra=tables_of(text, model)).value, folder / "run") as session:
        for step in session:
            ACTIONS[action](session, step)


def judge(session: Session, step: Step) -> None:
    session.loss({"x": torch.zeros(2, 8, dtype=torch.long), "y": torch.zeros(2, 8, dtype=torch.long)})


def run_twice(session: Session, step: Step) -> None:
    step.run()
    step.run()


ACTIONS = {"run": lambda _, step: step.run(), "loss": judge, "run twice": run_twice}
WHOLE = "session.loss(batch) needs the whole model"

CASES: dict[str, tuple[str, dict[str, Any], str, type[CloseranksError], str]] = {
    "a loss by hand": (
        "pipeline=2",
        {"stages": STAGES},
        "loss",
        UserError,
        "session.loss(batch) needs the whole model",
    ),
    "a second run": ("pipeline=2", {"stages": STAGES}, "run twice", UserError, "taken already"),
    "a penalty on stages": (
        "pipeline=2",
        {"stages": STAGES, "loss": f"{__name__}:penalty"},
        "run",
        ModelError,
        "read 'parameters' of the module",
    ),
    "a penalty on shards": (
        "data=2 zero=3",
        {"loss": f"{__name__}:penalty_alone"},
        "run",
        ModelError,
        "computed from the module's parameters themselves",
    ),
    "a table that does not fit": (
        "tensor=2",
        {"name": f"{__name__}:counting", "tensor": PAIR},
        "run",
        ModelError,
        "up.weight' [20, 12] is split along dim 0 into 10 each",
    ),
}


@pytest.mark.world
@pytest.mark.parametrize("case", CASES)
def test_what_does_not_fit_is_told_in_one_sentence(tmp_path: Path, case: str) -> None:
    text, model, action, kind, words = CASES[case]
    with pytest.raises(WorldError, match=rf"{kind.__name__}: .*{re.escape(words)}"):
        run_world(train, 2, tmp_path, text, model, action, timeout_s=300)


def test_waves_of_an_evaluation_grow_with_the_pipeline() -> None:
    assert [num_pipelined_micro_batches(stages) for stages in (1, 2, 4, 8)] == [8, 8, 16, 32]


def problems_of(text: str, num_workers: int) -> list[str]:
    job = load_job(None, extra=tables_of("data=0", {})).value
    values = {name: int(size) for name, size in (pair.split("=") for pair in text.split())}
    return [
        str(one)
        for one in check_workers(job.model_copy(update={"layout": job.layout.model_copy(update=values)}), num_workers)
    ]


def test_one_worker_is_spoken_of_as_one() -> None:
    assert "takes 1 worker, but 2 were asked for" in problems_of("data=1", 2)[0]
    assert "takes 2 workers, but 1 was asked for" in problems_of("data=2", 1)[0]


def test_an_axis_of_nothing_is_the_one_problem() -> None:
    (problem,) = problems_of("tensor=0", 0)
    assert problem.endswith("An axis has at least 1 rank.")
    (problem,) = problems_of("tensor=0", 4)
    assert problem.endswith("An axis has at least 1 rank. The nearest legal layout is data=4.")
