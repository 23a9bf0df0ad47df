"""A session in a user's own loop: every way out closes it, and every mistake is told."""

from __future__ import annotations

import gc
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from closeranks import Hook, Session, Step, UserError
from closeranks.core.errors import CheckpointError, ConfigError, DataError, ModelError
from closeranks.core.events import (
    Evaluated,
    MemoryUsed,
    Resources,
    Resumed,
    RunEnded,
    RunStarted,
    Saved,
    StepDone,
    StepPhases,
    Warned,
)
from closeranks.core.protocols import Batch
from closeranks.run.components.batches import check_dataset_lengths
from closeranks.run.components.step_traces import StepTraces
from tests.run.saved import tensors, tree
from tests.run.small import counted, dataset, events, loss, net, of_kind, open_session, train

pytestmark = pytest.mark.usefixtures("alone")


def learn(session: Session, on_batch: Callable[[Session, Step, Batch], None] | None = None) -> None:
    """The loop a user writes; ``on_batch`` stands for what they wrote instead of the right line."""
    for step in session:
        for batch in step:
            if on_batch is None:
                step.backward(session.loss(batch))
            else:
                on_batch(session, step, batch)


def ended(folder: Path) -> tuple[int, str, str]:
    (event,) = of_kind(folder, RunEnded)
    return event.step, event.reason, event.detail


def loader_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "loader" in thread.name]


# The way through


def test_a_run_leaves_its_story_in_order(tmp_path: Path) -> None:
    learn(open_session(tmp_path, eval_data=dataset(seed=1), train={"steps": 2}))
    kinds = [type(event) for event in events(tmp_path) if not isinstance(event, Resources)]  # they come when it is time
    told = [RunStarted, StepDone, StepDone, StepPhases, MemoryUsed, Saved, Evaluated, StepPhases, MemoryUsed, RunEnded]
    assert kinds == told
    assert ended(tmp_path) == (2, "finished", "")


def test_a_loop_that_changes_the_working_folder_still_writes_into_the_run_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    session = open_session(Path("run"), train={"steps": 2}, checkpoint={"remote": "second"})
    os.chdir("elsewhere")
    learn(session)
    assert session.result.folder == tmp_path / "run"
    for place in ("run/checkpoints", "second"):
        assert (tmp_path / place / "step-00000002").is_dir()
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_the_run_folder_holds_the_resolved_job(tmp_path: Path) -> None:
    learn(open_session(tmp_path, train={"steps": 1}))
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["train"]["steps"] == 1
    assert config["optim"]["lr"] == 1e-2
    assert config["model"]["name"] == "tests.run.small:net"


def test_steps_say_what_they_are(tmp_path: Path) -> None:
    session = open_session(tmp_path, loss=counted, metrics=["accuracy"])
    indices = []
    for step in session:
        indices.append(step.index)
        assert session.num_done == step.index
        for batch in step:
            assert batch["x"].shape == (4, 4)
            step.backward(session.loss(batch))
    assert indices == [0, 1, 2, 3]
    for done in of_kind(tmp_path, StepDone):
        assert done.weight == done.items == 8
        assert done.position == 8 * done.step
        assert 0 <= done.metrics["accuracy"] <= 1
        assert done.taken


def test_a_plain_mean_and_a_sum_with_its_weight_are_the_same_loss(tmp_path: Path) -> None:
    train(tmp_path / "mean")
    train(tmp_path / "sum", loss=counted, metrics=["accuracy"])
    mean, total = ([done.loss for done in of_kind(tmp_path / name, StepDone)] for name in ("mean", "sum"))
    assert mean == pytest.approx(total, rel=1e-6)


def test_a_module_that_is_built_already_is_trained_in_place(tmp_path: Path) -> None:
    module = net()
    before = module[0].weight.detach().clone()
    session = open_session(tmp_path, model=module)
    learn(session)
    assert session.model is module
    assert not torch.equal(module[0].weight, before)


def test_the_session_evaluates_when_asked(tmp_path: Path) -> None:
    session = open_session(tmp_path, eval_data=dataset(seed=1), loss=counted, metrics=["accuracy"])
    for step in session:
        if step.index == 2:
            result = session.evaluate()
            assert (result.step, result.weight) == (2, 64)
            assert set(result.metrics) == {"accuracy"}
        for batch in step:
            step.backward(session.loss(batch))
    assert [event.step for event in of_kind(tmp_path, Evaluated)] == [2, 4]
    assert session.result.eval == of_kind(tmp_path, Evaluated)[-1]


def test_an_evaluation_without_data_says_where_to_get_it(tmp_path: Path) -> None:
    with open_session(tmp_path) as session, pytest.raises(DataError, match="pass eval_data"):
        session.evaluate()


@pytest.mark.parametrize("kind", [str, Path])
def test_the_session_saves_where_it_is_told(tmp_path: Path, kind: type) -> None:
    session = open_session(tmp_path / "run", checkpoint={"save": False})
    for step in session:
        if step.index == 3:
            assert session.save(kind(tmp_path / "mine")) == str(tmp_path / "mine" / "step-00000003")
        for batch in step:
            step.backward(session.loss(batch))
    assert tree(tmp_path / "mine")["progress"] == {"step": 3, "position": 24}
    assert not (tmp_path / "run" / "checkpoints").exists(), "checkpoint.save = false"
    rest = train(tmp_path / "rest", checkpoint={"resume": str(tmp_path / "mine")})
    assert rest.steps == 4
    assert rest.loss == session.result.loss


def test_epochs_are_every_sample_once_the_last_step_short(tmp_path: Path) -> None:
    seen: list[Tensor] = []

    def watched(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        seen.append(batch["x"])
        return loss(model, batch)

    data = dataset(27)
    result = train(tmp_path, data=data, loss=watched, train={"steps": None, "epochs": 1.0})
    assert result.steps == 4
    rows = torch.cat(seen)
    assert len(rows) == 27
    assert sorted(rows[:, 0].tolist()) == sorted(data.tensors[0][:, 0].tolist())
    assert [done.items for done in of_kind(tmp_path, StepDone)] == [8, 8, 8, 3]


def test_steps_go_on_past_the_end_of_the_data(tmp_path: Path) -> None:
    result = train(tmp_path, data=dataset(10), train={"steps": 5})
    assert result.steps == 5
    assert {done.items for done in of_kind(tmp_path, StepDone)} == {8}


@pytest.mark.parametrize("table", [{"steps": None}, {"steps": 3, "epochs": 1.0}])
def test_a_length_is_given_once(tmp_path: Path, table: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="steps"):
        open_session(tmp_path, train=table)


class Growing:
    """A dataset whose length is another one each time it is asked for."""

    def __init__(self) -> None:
        self.asked = 0

    def __len__(self) -> int:
        self.asked += 1
        return 20 + self.asked

    def __getitem__(self, index: int) -> Tensor:
        return torch.zeros(4)


def test_a_length_that_changes_is_told_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"the length of .*Growing .* has changed while .*: 2\d samples"):
        open_session(tmp_path, data=Growing())


def test_a_dataset_of_another_length_is_not_resumed_with(tmp_path: Path) -> None:
    class Named(Growing):
        identity = "mine"

        def __init__(self, size: int) -> None:
            self.size = size

        def __len__(self) -> int:
            return self.size

        def read(self, indices: Any) -> Batch:
            return {"x": torch.zeros(len(indices), 4), "y": torch.zeros(len(indices), dtype=torch.long)}

    train(tmp_path, data=Named(20))
    with pytest.raises(CheckpointError, match="saved with a dataset of 20 samples, and it has 24 now"):
        open_session(tmp_path, data=Named(24), train={"steps": 9}, checkpoint={"resume": str(tmp_path)})


def test_lengths_that_differ_between_ranks_are_named() -> None:
    check_dataset_lengths(["8", "8"], "mine")
    with pytest.raises(DataError, match="mine has 8 samples on rank 0 and 9 on rank 2"):
        check_dataset_lengths(["8", "8", "9"], "mine")


def test_zero_over_one_data_rank_is_told_to_have_no_effect(tmp_path: Path) -> None:
    train(tmp_path / "zero", layout={"zero": 3}, train={"steps": 1})
    (warned,) = of_kind(tmp_path / "zero", Warned)
    assert warned.what.startswith("layout.zero = 3 shards state over data ranks; with one data rank it has no effect")
    train(tmp_path / "plain", train={"steps": 1})
    assert not of_kind(tmp_path / "plain", Warned)


# Mistakes in the loop


def test_a_forgotten_backward_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"the next batch was taken before step.backward\(loss\) \(step 1\)"):
        learn(open_session(tmp_path), lambda session, step, batch: None)
    assert ended(tmp_path)[1] == "stopped"  # raised in the user's loop: without `with`, a session sees it only left


def test_a_step_that_nobody_looked_into_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="called 0 times for 2"):
        for _ in open_session(tmp_path):
            pass


def test_batches_cannot_be_gathered_first(tmp_path: Path) -> None:
    steps = iter(open_session(tmp_path))
    step = next(steps)
    with pytest.raises(UserError, match="the next batch was taken before"):
        list(step)


def test_evaluating_or_saving_within_a_step_is_refused(tmp_path: Path) -> None:
    def midway(session: Session, step: Step, batch: Batch) -> None:
        step.backward(session.loss(batch))
        session.save()

    with pytest.raises(UserError, match="within a step"):
        learn(open_session(tmp_path), midway)


def test_a_second_backward_is_told(tmp_path: Path) -> None:
    def twice(session: Session, step: Step, batch: Batch) -> None:
        step.backward(session.loss(batch))
        step.backward(session.loss(batch))

    with pytest.raises(UserError, match=r"called without a batch \(step 1\)"):
        learn(open_session(tmp_path), twice)


def test_a_step_is_worked_off_once(tmp_path: Path) -> None:
    with open_session(tmp_path) as session:
        step = next(iter(session))
        step.run()
        for again in (step.run, lambda: list(step)):
            with pytest.raises(UserError, match="micro-batches of this step are taken already"):
                again()


def test_a_loss_that_is_no_tensor_is_told(tmp_path: Path) -> None:
    def as_number(session: Session, step: Step, batch: Batch) -> None:
        step.backward(session.loss(batch).total.item())  # type: ignore[arg-type]

    with pytest.raises(ModelError, match="a float"):
        learn(open_session(tmp_path), as_number)


def test_a_misspelt_table_is_told_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Did you mean \[train\]"):
        open_session(tmp_path / "run", trian={"steps": 3})
    assert not (tmp_path / "run").exists()


def test_a_session_runs_once(tmp_path: Path) -> None:
    session = open_session(tmp_path)
    for step in session:
        for batch in step:
            step.backward(session.loss(batch))
        break
    with pytest.raises(UserError, match="has run already"):
        learn(session)
    assert session.num_done == 0


# Ways out


def test_breaking_off_closes_the_session(tmp_path: Path) -> None:
    session = open_session(tmp_path)
    for step in session:
        for batch in step:
            step.backward(session.loss(batch))
        if step.index == 1:
            break
    assert not dist.is_initialized()
    assert gc.isenabled()
    assert loader_threads() == []
    assert ended(tmp_path) == (1, "stopped", "the training loop exited early")
    assert session.result.steps == 1, "the step that was broken off was not taken"


def test_an_exception_in_a_with_is_recorded_as_a_failure(tmp_path: Path) -> None:
    def divides(session: Session, step: Step, batch: Batch) -> None:
        step.backward(session.loss(batch))
        if step.index == 2:
            raise ZeroDivisionError("by mistake")

    with pytest.raises(ZeroDivisionError), open_session(tmp_path) as session:
        learn(session, divides)
    assert ended(tmp_path) == (2, "failed", "by mistake")
    assert (session.result.reason, session.result.detail) == ("failed", "by mistake")
    assert loader_threads() == []


def test_an_exception_before_the_first_step_closes_too(tmp_path: Path) -> None:
    class Ends(Hook):
        def on_end(self, session: Session) -> None:
            raise AssertionError("it never started")

    with pytest.raises(KeyError), open_session(tmp_path, hooks=[Ends()], telemetry={"tensorboard": True}):
        raise KeyError("early")
    assert ended(tmp_path)[:2] == (0, "failed")


def test_closing_twice_is_harmless(tmp_path: Path) -> None:
    session = open_session(tmp_path)
    session.close()
    session.close()
    assert ended(tmp_path) == (0, "finished", "")


def test_everything_is_given_back_whatever_fails_to_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(traces: StepTraces, num_done: int, emit: object) -> None:
        raise OSError("the trace could not be written")

    monkeypatch.setattr(StepTraces, "ended", broken)
    with pytest.raises(OSError, match="the trace"):
        learn(open_session(tmp_path))
    assert not dist.is_initialized()
    assert gc.isenabled()
    assert loader_threads() == []


def test_a_second_session_in_the_same_process_starts_from_nothing(tmp_path: Path) -> None:
    first, second = (train(tmp_path / name) for name in ("first", "second"))
    assert first.loss == second.loss
    left, right = (tensors(tmp_path / name, "model") for name in ("first", "second"))
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_a_session_that_does_not_open_leaves_nothing_open(tmp_path: Path) -> None:
    train(tmp_path / "old")

    def raises() -> nn.Module:
        raise ValueError("no such weights")

    refused: list[dict[str, Any]] = [
        {"model": raises},
        {"checkpoint": {"resume": str(tmp_path / "nowhere")}},
        {"checkpoint": {"resume": str(tmp_path / "old")}, "run": {"seed": 5}},
        {"run": {"hooks": ["tests.run.small:net"]}},
        {"optim": {"groups": [{"pattern": "*", "frozen": True}]}},
    ]
    for number, changes in enumerate(refused):
        with pytest.raises(UserError):
            open_session(tmp_path / str(number), **changes)
        assert not dist.is_initialized(), changes
    assert train(tmp_path / "after").steps == 4


def test_a_users_own_group_is_left_standing(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        train(tmp_path)
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_what_is_resumed_is_told_and_goes_on(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", train={"steps": 6})
    train(tmp_path / "half", train={"steps": 6}, hooks=[_StopAt2()])
    rest = train(tmp_path / "rest", train={"steps": 6}, checkpoint={"resume": str(tmp_path / "half")})
    (resumed,) = of_kind(tmp_path / "rest", Resumed)
    assert resumed.step == 3
    assert of_kind(tmp_path / "rest", RunStarted)[0].first_step == 3
    assert (rest.steps, rest.loss) == (6, whole.loss)


class _StopAt2(Hook):
    def on_step(self, session: Session, step: StepDone) -> None:
        if step.step == 2:
            session.stop("half way")


def test_a_run_that_is_done_already_trains_no_further(tmp_path: Path) -> None:
    train(tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"the state is at step 4 of 4\. Set train\.steps to more than 4"):
        open_session(tmp_path / "run", checkpoint={"resume": str(tmp_path / "run")})
    assert len(of_kind(tmp_path / "run", StepDone)) == 4


def test_a_missing_state_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere"):
        open_session(tmp_path / "run", checkpoint={"resume": str(tmp_path / "nowhere")})
