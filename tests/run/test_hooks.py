"""Hooks are called in order on every rank, stop all ranks together, and are named when they fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from closeranks import EarlyStop, Hook, Session, UserError
from closeranks.core.errors import DataError
from closeranks.core.events import Evaluated, RunEnded, RunStarted, Saved, StepDone, Warned
from closeranks.run.builder.run_definition import make_hooks
from closeranks.run.job.job import load_job
from closeranks.testing import run_world
from tests.cli.commands import closeranks
from tests.cli.test_bad_input import own_job, refused
from tests.run.small import counted, dataset, of_kind, open_session, train

pytestmark = pytest.mark.usefixtures("alone")


class Calls(Hook):
    """Writes down what it is called for."""

    def __init__(self, name: str = "", into: list[str] | None = None) -> None:
        self._name = name
        self.made: list[str] = [] if into is None else into

    def on_start(self, session: Session) -> None:
        self.made.append(f"{self._name}start")

    def on_step(self, session: Session, step: StepDone) -> None:
        self.made.append(f"{self._name}step {step.step}")

    def on_eval(self, session: Session, result: Evaluated) -> None:
        self.made.append(f"{self._name}eval {result.step}")

    def on_end(self, session: Session) -> None:
        self.made.append(f"{self._name}end")


def test_the_sequence_of_calls(tmp_path: Path) -> None:
    calls = Calls()
    train(tmp_path, hooks=[calls], eval_data=dataset(seed=1), train={"steps": 5, "eval_every": 2})
    assert calls.made == [
        *("start", "step 1", "step 2", "eval 2", "step 3", "step 4", "eval 4", "step 5", "eval 5", "end"),
    ]


def test_hooks_are_called_in_their_order_and_ended_in_reverse(tmp_path: Path) -> None:
    made: list[str] = []
    train(tmp_path, hooks=[Calls("a ", made), Calls("b ", made)], train={"steps": 1})
    assert made == ["a start", "b start", "a step 1", "b step 1", "b end", "a end"]


def test_an_evaluation_that_falls_on_the_last_step_is_not_made_twice(tmp_path: Path) -> None:
    calls = Calls()
    train(tmp_path, hooks=[calls], eval_data=dataset(seed=1), train={"steps": 4, "eval_every": 2})
    assert [call for call in calls.made if call.startswith("eval")] == ["eval 2", "eval 4"]


class Fails(Hook):
    def __init__(self, method: str, error: Exception | None = None) -> None:
        self._error = error or ValueError("bad {thing}")
        setattr(self, method, self._fail)

    def _fail(self, *arguments: Any) -> None:
        raise self._error


@pytest.mark.parametrize("method", ["on_start", "on_step", "on_eval", "on_end"])
def test_a_hook_that_raises_ends_the_run_by_its_name(tmp_path: Path, method: str) -> None:
    calls = Calls()
    with pytest.raises(UserError, match=rf"the hook Fails raised in {method}: ValueError: bad {{thing}}") as told:
        train(tmp_path, hooks=[calls, Fails(method)], eval_data=dataset(seed=1))
    assert "test_hooks.py:" in str(told.value), "with the line"
    assert isinstance(told.value.__cause__, ValueError)
    assert calls.made[-1] == "end", "the other hooks come to their end"
    (ended,) = of_kind(tmp_path, RunEnded)
    assert ended.reason == "failed"
    assert "Fails" in ended.detail


def test_a_hook_that_fails_at_its_end_does_not_hide_what_ended_the_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="raised in on_step"):
        train(tmp_path, hooks=[Fails("on_end", KeyError("later")), Fails("on_step")])
    (warned,) = of_kind(tmp_path, Warned)
    assert "raised in on_end: KeyError: 'later'" in warned.what
    assert "on_step" in of_kind(tmp_path, RunEnded)[0].detail


def test_a_hook_that_never_started_is_not_ended(tmp_path: Path) -> None:
    """It may close in ``on_end`` what it opens in ``on_start``."""
    calls = Calls()
    with pytest.raises(UserError, match="raised in on_start"):
        train(tmp_path, hooks=[Fails("on_start"), calls])
    assert calls.made == []


def test_an_error_of_ours_passes_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the disk of the hook is full"):
        train(tmp_path, hooks=[Fails("on_step", DataError("the disk of the hook is full"))])


def test_a_lost_peer_is_not_blamed_on_the_hook_that_met_it(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="closed by peer"):
        train(tmp_path, hooks=[Fails("on_step", RuntimeError("Connection closed by peer [127.0.0.1]:1"))])


# Stopping


class StopAt(Hook):
    def __init__(self, step: int, rank: int = 0, reason: str = "that is enough") -> None:
        self._step, self._rank, self._reason = step, rank, reason

    def on_step(self, session: Session, step: StepDone) -> None:
        if step.step == self._step and session.world.rank == self._rank:
            session.stop(self._reason)


def test_a_stop_ends_after_the_next_step_and_saves(tmp_path: Path) -> None:
    result = train(tmp_path, hooks=[StopAt(2)], train={"steps": 10}, eval_data=dataset(seed=1))
    assert (result.steps, result.reason, result.detail) == (3, "stopped", "that is enough")
    assert result.eval is None, "whoever stops early is not kept waiting for an evaluation"
    assert of_kind(tmp_path, Saved)[-1].step == 3
    assert of_kind(tmp_path, RunEnded)[0].reason == "stopped"


def test_a_stop_in_the_last_step_comes_too_late(tmp_path: Path) -> None:
    result = train(tmp_path, hooks=[StopAt(4)])
    assert (result.steps, result.reason) == (4, "finished")


def test_the_first_reason_stands(tmp_path: Path) -> None:
    result = train(tmp_path, hooks=[StopAt(2), StopAt(2, reason="me too")])
    assert result.detail == "that is enough"


def evaluated(loss: float, **metrics: float) -> Evaluated:
    return Evaluated(step=1, loss=loss, metrics=metrics)


class Asked:
    """As much of a session as ``EarlyStop`` sees."""

    reason = ""

    def stop(self, reason: str) -> None:
        self.reason = self.reason or reason


def judged(hook: EarlyStop, results: list[Evaluated]) -> list[bool]:
    """Whether a stop had been asked for after each of the evaluations."""
    asked, verdicts = Asked(), []
    for result in results:
        hook.on_eval(asked, result)  # type: ignore[arg-type]
        verdicts.append(bool(asked.reason))
    return verdicts


def test_early_stop_counts_evaluations_without_improvement() -> None:
    losses = [evaluated(loss) for loss in (3.0, 2.0, 2.5, 1.9, 2.0, 1.9, 1.8)]
    assert judged(EarlyStop(patience=2), losses) == [False] * 5 + [True] * 2
    assert judged(EarlyStop(patience=3), losses) == [False] * 7


def test_early_stop_can_look_at_a_metric_that_shall_grow() -> None:
    results = [evaluated(1.0, accuracy=value) for value in (0.5, 0.6, 0.6, 0.55)]
    assert judged(EarlyStop("accuracy", patience=2, maximise=True), results) == [False, False, False, True]
    assert judged(EarlyStop("accuracy", patience=2), results) == [False, False, True, True]


def test_early_stop_can_ask_for_more_than_a_trifle() -> None:
    losses = [evaluated(loss) for loss in (1.0, 0.99, 0.98)]
    assert judged(EarlyStop(patience=2, min_delta=0.1), losses) == [False, False, True]


def test_a_loss_that_is_not_a_number_is_no_improvement() -> None:
    losses = [evaluated(loss) for loss in (float("nan"), float("nan"))]
    assert judged(EarlyStop(patience=2), losses) == [False, True]


def test_early_stop_on_a_figure_that_nobody_reports(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"EarlyStop watches 'acuracy'.*Did you mean 'accuracy'\?"):
        train(
            tmp_path,
            hooks=[EarlyStop("acuracy")],
            loss=counted,
            metrics=["accuracy"],
            eval_data=dataset(seed=1),
        )


def stopped(folder: Path) -> dict[str, tuple[int, str, str]]:
    """Under two ranks: stopped by an evaluation, and by a hook of rank 1 alone."""
    never_better = EarlyStop(patience=2, min_delta=100.0)
    train_table = {"steps": 50, "global_batch": 8, "micro_batch": 2, "eval_every": 3}
    results = {
        "early": train(folder / "early", hooks=[never_better], eval_data=dataset(seed=1), train=train_table),
        "one rank": train(folder / "one", hooks=[StopAt(2, rank=1)], train=train_table),
    }
    return {name: (result.steps, result.reason, result.detail) for name, result in results.items()}


@pytest.mark.world
def test_all_ranks_stop_at_the_same_step_and_the_state_is_saved(tmp_path: Path) -> None:
    first, second = run_world(stopped, 2, tmp_path)
    # The first evaluation is the best so far, the next two are not; the stop ends the step after.
    reason = "loss has not improved for 2 evaluations"
    assert first["early"] == second["early"] == (10, "stopped", reason)
    assert first["one rank"] == (3, "stopped", ""), "only rank 1 knows why, yet nobody takes it for a signal"
    assert second["one rank"] == (3, "stopped", "that is enough")
    for name, step in (("early", 10), ("one", 3)):
        assert of_kind(tmp_path / name, Saved)[-1].step == step
        assert {of_kind(tmp_path / name, RunEnded, rank)[0].step for rank in (0, 1)} == {step}


# Hooks that a job names

HOOKS = """
from closeranks import Hook
class Fails(Hook):
    def on_step(self, session, step):
        if step.step == 2 and session.world.rank == 1:
            raise ValueError("bad {thing}")
class NoHook: ...
"""


def test_a_job_names_its_hooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "named_hooks.py").write_text(HOOKS)
    monkeypatch.syspath_prepend(tmp_path)
    extra = {"model": {}, "data": {}, "train": {"steps": 1}}

    def made(*names: str) -> list[str]:
        job = load_job(None, extra={**extra, "run": {"hooks": names}}).value
        return [type(hook).__name__ for hook in make_hooks(job)]

    assert made("named_hooks:Fails") == ["Fails"]
    with pytest.raises(UserError, match=r"'named_hooks:NoHook' is not a closeranks\.Hook"):
        made("named_hooks:NoHook")
    with pytest.raises(UserError, match=r"Did you mean 'Fails'\?"):
        made("named_hooks:Fail")


@pytest.mark.world
def test_a_job_whose_hook_raises_on_one_rank_ends_with_one_sentence(tmp_path: Path) -> None:
    """Its message holds braces, which no formatting of ours may take for its own."""
    job = own_job(tmp_path)
    (tmp_path / "own_hooks.py").write_text(HOOKS)
    done = closeranks("train", job, "-n", 2, 'run.hooks=["own_hooks:Fails"]', "telemetry.report=false", cwd=tmp_path)
    refused(done, "the hook Fails raised in on_step: ValueError: bad {thing}", "own_hooks.py:6")


def test_tensorboard_is_written_beside_the_run_and_follows_a_resume(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    class SaveAt3(Hook):
        def on_step(self, session: Session, step: StepDone) -> None:
            if step.step == 3:
                session.save(tmp_path / "run" / "third")

    common: dict[str, Any] = {
        "telemetry": {"tensorboard": True},
        "train": {"steps": 6},
        "eval_data": dataset(seed=1),
    }
    train(tmp_path / "run", hooks=[SaveAt3()], **common)
    train(tmp_path / "run", checkpoint={"resume": str(tmp_path / "run" / "third")}, **common)
    (folder,) = [path.parent for path in tmp_path.rglob("events.out.tfevents.*")][:1]
    assert folder == tmp_path / "run" / "tensorboard"
    board = EventAccumulator(str(folder)).Reload()
    assert {"train/loss", "train/lr", "train/grad_norm", "eval/loss"} <= set(board.Tags()["scalars"])
    shown = [(event.step, event.value) for event in board.Scalars("train/loss")]
    assert [step for step, _ in shown] == [1, 2, 3, 4, 5, 6], "what the resumed run did again is shown once"
    told = [done.loss for done in of_kind(tmp_path / "run", StepDone)][:6]
    assert [value for _, value in shown] == pytest.approx(told, rel=1e-6)
    assert len(of_kind(tmp_path / "run", RunStarted)) == 2


def test_a_session_hands_out_its_hooks_only_what_was_settled(tmp_path: Path) -> None:
    """What ``on_step`` sees is what the session's result says at that moment."""

    class Look(Hook):
        def __init__(self) -> None:
            self.seen: list[bool] = []

        def on_step(self, session: Session, step: StepDone) -> None:
            self.seen.append(session.result.loss == step.loss and session.result.steps == step.step)

    look = Look()
    session = open_session(tmp_path, hooks=[look])
    for step in session:
        for batch in step:
            step.backward(session.loss(batch))
    assert look.seen == [True] * 4
