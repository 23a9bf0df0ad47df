"""Steps that cannot be taken: the run gives up in time, and fp16 is given time to mend itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from closeranks.core.errors import DataError
from closeranks.core.events import RunEnded, StepDone
from closeranks.core.requests import REQUESTS
from closeranks.elastic.vote import Ballot
from closeranks.run.components.component import Component
from closeranks.run.step.step import Step
from closeranks.run.step.step_results import StepResults, non_finite_advice
from closeranks.testing import run_world
from tests.run.saved import tensors
from tests.run.small import loss, of_kind, open_session, train

pytestmark = pytest.mark.usefixtures("alone")

CHECKED = {"data": None}


class Spoiled:
    """A loss that is not finite in the named steps; two micro-batches make a step."""

    def __init__(self, *steps: int, value: float = float("nan")) -> None:
        self._steps, self._value, self._calls = steps, value, 0

    def __call__(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        self._calls += 1
        step = (self._calls + 1) // 2
        return loss(model, batch) * (self._value if step in self._steps else 1.0)


def taken(folder: Path) -> list[bool]:
    return [done.taken for done in of_kind(folder, StepDone)]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_streak_of_steps_that_are_not_finite_ends_the_run(tmp_path: Path, value: float) -> None:
    with pytest.raises(DataError, match=r"not been finite for 3 steps in a row, since step 3 \(step 5\)\. Lower"):
        train(tmp_path, loss=Spoiled(3, 4, 5, 6, value=value), train={"steps": 9})
    assert taken(tmp_path) == [True, True, False, False, False], "each is on record, the last one too"
    assert of_kind(tmp_path, RunEnded)[0].reason == "failed"


def test_the_advice_names_what_the_job_does_not_do_yet(tmp_path: Path) -> None:
    with pytest.raises(DataError) as told:
        train(tmp_path, loss=Spoiled(1, 2, 3), train={"steps": 9})
    assert "float32" not in str(told.value), "it is what this job trains in"
    assert "optim.clip" not in str(told.value), "it clips by default"
    assert "float32" in non_finite_advice("bf16", 1.0)
    assert "optim.clip = 1.0" in non_finite_advice("float32", 0.0)


def test_patience_is_the_jobs(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="for 1 steps in a row"):
        train(tmp_path, loss=Spoiled(2), train={"patience": 1})


def test_a_step_now_and_then_is_skipped_and_forgiven(tmp_path: Path) -> None:
    result = train(tmp_path, loss=Spoiled(1, 2, 4, 5), train={"steps": 7})
    assert taken(tmp_path) == [False, False, True, False, False, True, True]
    assert result.reason == "finished"


def test_a_skipped_step_leaves_the_weights_alone(tmp_path: Path) -> None:
    """Two steps are skipped of three: the weights are those that follow from the third alone."""

    class Watch(Spoiled):
        def __call__(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
            self.seen = getattr(self, "seen", [])
            self.seen.append(model[0].weight.detach().clone())
            return super().__call__(model, batch)

    watch = Watch(1, 2)
    train(tmp_path, loss=watch, train={"steps": 3})
    first = watch.seen[0]
    assert all(torch.equal(weight, first) for weight in watch.seen[:6])
    final = tensors(tmp_path, "model")["0.weight"]
    assert not torch.equal(final, first)
    assert bool(final.isfinite().all())


def fp16(**scale: float) -> dict[str, Any]:
    return {"train": {"precision": "fp16", "steps": 8}, "optim": {"loss_scale": scale}}


def test_fp16_may_overflow_longer_than_patience_and_recovers(tmp_path: Path) -> None:
    """Five steps are skipped while the scale comes down: that is no mistake of anybody's."""
    train(tmp_path, **fp16(init=2.0**22))
    done = of_kind(tmp_path, StepDone)
    skipped = taken(tmp_path).count(False)
    assert skipped > 3
    assert all(taken(tmp_path)[skipped:])
    scales = [step.loss_scale for step in done]
    assert scales[: skipped + 1] == [2.0**22 / 2**n for n in range(skipped + 1)]


def test_fp16_at_its_smallest_scale_has_no_more_excuse(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="3 steps in a row"):
        train(tmp_path, loss=Spoiled(*range(1, 9)), **fp16(init=2.0, minimum=1.0))
    # Half the scale is left after the first step; from then on three in a row are too many.
    assert [done.loss_scale for done in of_kind(tmp_path, StepDone)] == [2.0, 1.0, 1.0, 1.0]


def test_the_account_of_a_step_is_whole(tmp_path: Path) -> None:
    train(tmp_path, train={"steps": 3})
    for done in of_kind(tmp_path, StepDone):
        assert done.seconds > 0
        assert done.memory_bytes > 1 << 20
        assert done.grad_norm > 0
        assert done.loss_scale == 1.0
        assert 0 <= done.data_wait_s <= done.seconds + 0.05
    assert [done.lr for done in of_kind(tmp_path, StepDone)] != [1e-2] * 3, "the schedule's, step by step"


class Counted(Component):
    """Adds a number to the ballot, and tells its sum over the ranks in a field of the step that exists already."""

    def before_vote(self, index: int, ballot: Ballot) -> None:
        ballot.extra["counted"] = torch.tensor([index + 1], dtype=torch.float64)

    def voted_figures(self, extra: Mapping[str, Sequence[float]]) -> Mapping[str, Any]:
        return {"data_fetch_s": extra["counted"][0]}


def counted(folder: Path, **tables: Any) -> list[float]:
    with open_session(folder, train={"steps": 4}, **tables) as session:
        session.engine.components.add(Counted())
        for step in session:
            step.run()
        rank = session.world.rank
    return [done.data_fetch_s for done in of_kind(folder, StepDone, rank)]


def test_a_component_tells_what_the_vote_says_of_a_step(tmp_path: Path) -> None:
    assert counted(tmp_path) == [1, 2, 3, 4]


@pytest.mark.world
@pytest.mark.parametrize("sync", [{}, {"local": {"every": 2}}], ids=["together", "apart"])
def test_every_rank_tells_the_same_of_the_vote(tmp_path: Path, sync: dict[str, Any]) -> None:
    """Where replicas train apart, once they meet."""
    ranks = run_world(partial(counted, sync=sync), 2, tmp_path)
    assert ranks == [[2, 4, 6, 8]] * 2


@pytest.mark.parametrize("kind", ["drain", "save", "stop", "regroup"])
def test_what_is_asked_for_with_a_step_is_settled_with_it(tmp_path: Path, kind: str) -> None:
    """And with no other: a generation ends after the very step that was agreed on."""
    with open_session(tmp_path) as session:
        ledger, said = StepResults(session.engine), []
        session.engine.batches.start(0, session.folder, session.recorder.emit)
        for asked in ((), {REQUESTS[kind]}, ()):
            step = Step(session.engine, len(said))
            step.run()
            (settled,) = ledger.push(step.index, step.commit(asked))
            said.append(settled.requests)
    assert said == [set(), {REQUESTS[kind]}, set()]
