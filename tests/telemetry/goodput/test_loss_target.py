"""A target loss is found in the events of a run, over its faults and commands, with what the run took until then."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from closeranks.core.events import Evaluated, Event, RunStarted, StepDone
from closeranks.facts.prices import DevicePrice
from closeranks.telemetry.goodput.loss_target import (
    LossTarget,
    TargetWatch,
    continued_watch,
    load_target,
    target_words,
    tell_target,
    watch_events,
)
from closeranks.telemetry.goodput.time_account import TimeAccount
from closeranks.telemetry.live.status import (
    RunStatus,
    StatusFreshness,
    StatusWriter,
    decode_status,
    encode_status,
    read_status,
)
from closeranks.telemetry.live.status_text import status_text
from closeranks.telemetry.reports.report import RunCommand, compose
from closeranks.telemetry.run_log.recorder import EventRecorder
from closeranks.telemetry.run_log.run_folder import RunFolder
from closeranks.telemetry.run_log.run_history import load_history

STARTED = RunStarted(world_size=2, last_step=60, target_loss=2.0, global_batch=8, item="token")
EVALUATING = replace(STARTED, target_of="evaluation")


def step(number: int, loss: float, **changes: object) -> StepDone:
    return StepDone(number, loss=loss, seconds=1.0, items=100, **changes)  # type: ignore[arg-type]


def falling(first: int, last: int) -> list[Event]:
    """A loss of 6 - step / 10."""
    return [step(number, 6 - number / 10) for number in range(first, last + 1)]


def target_of(*events: Event) -> LossTarget:
    """The events, one a second."""
    found = watch_events([(100.0 + at, event) for at, event in enumerate(events)], ()).target
    assert found is not None
    return found


def test_training_counts_as_the_mean_of_20_steps() -> None:
    """The mean of steps 31 to 50 is 6 - 4.05, of steps 30 to 49 it is 6 - 3.95: the target is not crossed before."""
    found = target_of(STARTED, *falling(1, 60))
    assert (found.value, found.of, found.step) == (2.0, "training", 50)
    assert found.loss == pytest.approx(1.95)
    assert found.lowest == pytest.approx(6 - 5.05)
    assert (found.num_items, found.num_samples) == (50 * 100, 50 * 8)
    assert found.wall_s == pytest.approx(50.0)
    assert found.worker_s == pytest.approx(100.0)


def test_one_lucky_step_is_not_enough() -> None:
    steps = [step(number, 0.0 if number == 30 else 3.0) for number in range(1, 61)]
    found = target_of(STARTED, *steps)
    assert found.step is None
    assert found.lowest == pytest.approx(3.0 * 19 / 20)


def test_a_short_run_counts_as_a_whole() -> None:
    assert target_of(replace(STARTED, last_step=3), *(step(number, 1.0) for number in (1, 2, 3))).step == 3


def test_steps_that_were_not_taken_do_not_count() -> None:
    odd = [step(number, math.nan if number % 2 else 1.0, taken=not number % 2) for number in range(1, 61)]
    assert target_of(STARTED, *odd).step == 40


def test_evaluations_count_where_there_are_any() -> None:
    first, second, third = (Evaluated(number, loss=loss) for number, loss in ((20, 2.4), (40, 1.9), (60, 1.7)))
    found = target_of(EVALUATING, *falling(1, 20), first, *falling(21, 40), second, *falling(41, 60), third)
    assert (found.of, found.step, found.loss, found.lowest) == ("evaluation", 40, 1.9, 1.7)
    assert found.num_items == 4000
    assert target_of(EVALUATING, *falling(1, 60)).lowest is None, "the training loss is not asked"


def test_a_fault_before_it_takes_nothing_away() -> None:
    """Steps 36 to 45 are done twice: the same step reaches it, later, and each step counts once."""
    again = replace(STARTED, generation=1, first_step=35)
    plain, found = target_of(STARTED, *falling(1, 60)), target_of(STARTED, *falling(1, 45), again, *falling(36, 60))
    assert (found.step, found.loss, found.num_items) == (plain.step, pytest.approx(plain.loss), plain.num_items)
    assert found.wall_s > plain.wall_s + 9


def test_a_fault_after_it_does_not_unreach_it() -> None:
    again = replace(STARTED, generation=1, first_step=30)
    assert target_of(STARTED, *falling(1, 55), again, *falling(31, 60)) == replace(
        target_of(STARTED, *falling(1, 55)), lowest=pytest.approx(6 - 5.05)
    )


def test_another_target_begins_anew() -> None:
    lower = replace(STARTED, first_step=55, target_loss=1.5, last_step=90)
    found = target_of(STARTED, *falling(1, 55), lower, *falling(56, 59))
    assert (found.value, found.step) == (1.5, 56)
    none = watch_events([(0.0, STARTED), (1.0, replace(STARTED, target_loss=None))], ())
    assert none.target is None


def test_words() -> None:
    price = DevicePrice("H100", 3600.0, "USD", "a test", "2026-01-01")
    waiting = LossTarget(2.0, "evaluation")
    assert target_words(waiting, price, "H100", "token") == "2 in evaluation: not reached"
    near = replace(waiting, lowest=2.25)
    assert target_words(near, price, "H100", "token").endswith(": not reached (lowest so far 2.2500)")
    done = replace(near, step=84, loss=1.99, wall_s=41.0, worker_s=72.0, num_items=1_380_000, num_samples=21_500)
    assert target_words(done, price, "H100", "token") == (
        "2 in evaluation: reached at step 84, after 41 s (1.38M tokens, 21.5k samples, 0.02 GPU-hours, $72.00)"
    )
    assert target_words(done, None, "H100", "sample").endswith("(1.38M samples, 0.02 GPU-hours)")


@pytest.fixture
def record(tmp_path: Path) -> Callable[[Iterable[Event]], Path]:
    def write(events: Iterable[Event]) -> Path:
        (tmp_path / "config.json").write_text(json.dumps({"telemetry": {"target_loss": 2.0}}))
        recorder = EventRecorder(tmp_path, 0)
        for event in events:
            recorder.emit(event)
        recorder.close()
        return tmp_path

    return write


def test_status_and_report_say_it(record: Callable[[Iterable[Event]], Path]) -> None:
    folder = record([replace(STARTED, device="Xeon CPU"), *falling(1, 60)])
    found = load_target(folder)
    assert found is not None
    said: list[str] = []
    tell_target(folder, said.append)
    assert said[0].startswith("target loss 2 in training: reached at step 50, after ")
    report = compose(RunFolder(folder), load_history(folder), RunCommand("job.toml"))
    assert "| target loss | 2 in training: reached at step 50, after " in report
    status = RunStatus(run="runs/demo", state="running", device="Xeon CPU", at=9.0, began_at=1.0, target=found)
    text = status_text(status, StatusFreshness.NOW, 9.0)
    assert "target loss: 2 in training: reached at step 50" in text
    waiting = replace(status, target=LossTarget(2.0, lowest=3.5))
    assert "target loss: 2 in training: not reached (lowest so far 3.5000)" in status_text(
        waiting, StatusFreshness.NOW, 9.0
    )
    assert decode_status(json.loads(encode_status(status))) == status
    assert decode_status(json.loads(encode_status(replace(status, target=None)))).target is None
    StatusWriter(folder).write(status)
    kept = read_status(folder)
    assert kept is not None
    assert kept.target == found


def test_a_run_without_a_target_says_nothing(record: Callable[[Iterable[Event]], Path]) -> None:
    folder = record([replace(STARTED, target_loss=None), *falling(1, 30)])
    (folder / "config.json").write_text("{}")
    said: list[str] = []
    tell_target(folder, said.append)
    assert said == []
    assert "target loss" not in compose(RunFolder(folder), load_history(folder), RunCommand("job.toml"))


def test_a_command_that_continues_knows_the_earlier_steps(record: Callable[[Iterable[Event]], Path]) -> None:
    """The status that was left is a step behind: the events decide."""
    folder = record([STARTED, *falling(1, 45)])
    live = continued_watch(folder, LossTarget(2.0, "training", lowest=2.6))
    events: list[Event] = [replace(STARTED, first_step=45), *falling(46, 60)]
    reached = [event for event in events if live.add(event, TimeAccount)]
    assert [event.step for event in reached if isinstance(event, StepDone)] == [50]
    known = LossTarget(2.0, "training", step=12)
    assert continued_watch(folder, known).target == known
    assert continued_watch(folder / "absent", None).target is None


def test_every_figure_is_written_to_the_status() -> None:
    assert {field.name for field in dataclasses.fields(LossTarget)} <= set(
        json.loads(encode_status(RunStatus(target=LossTarget())))["target"]
    )
    assert TargetWatch().target is None
