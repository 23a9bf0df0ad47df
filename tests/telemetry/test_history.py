from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from closeranks.core.events import Evaluated, Event, RunEnded, Saved, StepDone, Warned, encode
from closeranks.telemetry.history import Caution, History, fold, load_history
from closeranks.telemetry.recorder import Recorder

from .conftest import CPU, step


def history_of(*events: Event) -> History:
    """The events, one a second."""
    lines: list[tuple[dict[str, Any], Event]] = [
        ({"rank": 0, **encode(event), "at": float(at)}, event) for at, event in enumerate(events)
    ]
    return fold(lines)


def test_throughput_leaves_out_the_first_step() -> None:
    work = history_of(CPU, *(step(number) for number in range(1, 12))).throughput()
    assert work.items_per_s == pytest.approx(10_000)
    assert work.first_steps_s == 2.0


def test_each_step_counts_once_when_the_run_went_back() -> None:
    first = [step(number, loss=9.0) for number in range(1, 9)]
    again = [step(number, loss=1.0, seconds=3.0 if number == 6 else 0.1) for number in range(6, 11)]
    history = history_of(
        CPU,
        *first,
        Evaluated(step=8, loss=9.0),
        replace(CPU, generation=1, first_step=5),
        *again,
        RunEnded(10, seconds=1.0),
    )
    assert [done.step for done in history.steps] == list(range(1, 11))
    assert [done.loss for done in history.steps] == [9.0] * 5 + [1.0] * 5
    assert history.evals == ()
    assert history.first_steps == {1, 6}
    assert history.restarts == (5,)
    assert history.throughput().items_per_s == pytest.approx(10_000)
    assert history.seconds == pytest.approx(9 + 6)


def test_a_run_that_began_again_has_not_ended() -> None:
    history = history_of(CPU, step(1), RunEnded(1, "drained"), replace(CPU, first_step=1))
    assert history.ended is None


def test_one_generation_that_ended_gives_its_own_account_of_time() -> None:
    assert history_of(CPU, step(1), RunEnded(1, "finished", 31.2)).seconds == 31.2


def test_the_latest_save_stands_last() -> None:
    history = history_of(CPU, Saved(10, "old"), Saved(20, "b"), replace(CPU, first_step=5), Saved(10, "new"))
    assert [saved.path for saved in history.saves] == ["b", "new"]


def test_warnings_of_all_ranks_are_gathered(tmp_path: Path) -> None:
    for rank, step_number in ((0, 7), (1, 3)):
        recorder = Recorder(tmp_path, rank)
        recorder.emit(Warned("the disk is slow", step=step_number))
        recorder.emit(StepDone(step=1))
        recorder.close()
    with (tmp_path / "metrics" / "rank-00001.jsonl").open("a") as file:
        file.write('{"event": "warning", "what": "tor')
    assert load_history(tmp_path).warnings == (Caution("the disk is slow", times=2, ranks=(0, 1), first_step=3),)


def test_an_empty_folder_is_an_empty_history(tmp_path: Path) -> None:
    history = load_history(tmp_path)
    assert history == History()
    assert history.started is None
    assert history.throughput().items_per_s is None


def test_a_run_folder_reads_back(make_run: Callable[..., Path]) -> None:
    history = load_history(make_run())
    assert len(history.steps) == 40
    assert history.num_skipped == 0
    assert history.pauses.evals_s == 1.0
    assert history.ended is not None
