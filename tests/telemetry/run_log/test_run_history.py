from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from closeranks.core.events import (
    Evaluated,
    Event,
    FlopsCounted,
    RankLost,
    RanksClosed,
    Restored,
    RunEnded,
    Saved,
    Snapshotting,
    StepDone,
    Warned,
    encode,
)
from closeranks.telemetry.run_log.fault_history import TimedEvent
from closeranks.telemetry.run_log.recorder import AGENT, EventRecorder
from closeranks.telemetry.run_log.run_history import RunHistory, WarningCount, build_history, load_history
from tests.telemetry.conftest import CPU, step


def history_of(*events: Event) -> RunHistory:
    """The events, one a second."""
    lines: list[tuple[dict[str, Any], Event]] = [
        ({"rank": 0, **encode(event), "at": float(at)}, event) for at, event in enumerate(events)
    ]
    return build_history(lines)


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
    assert history.seconds == pytest.approx(16), "the second between the two generations is the run's"


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
        recorder = EventRecorder(tmp_path, rank)
        recorder.emit(Warned("the disk is slow", step=step_number))
        recorder.emit(StepDone(step=1))
        recorder.close()
    with (tmp_path / "metrics" / "rank-00001.jsonl").open("a") as file:
        file.write('{"event": "warning", "what": "tor')
    assert load_history(tmp_path).warnings == (WarningCount("the disk is slow", times=2, ranks=(0, 1), first_step=3),)


def test_an_empty_folder_is_an_empty_history(tmp_path: Path) -> None:
    history = load_history(tmp_path)
    assert history == RunHistory()
    assert history.started is None
    assert history.throughput().items_per_s is None


def test_a_run_folder_reads_back(make_run: Callable[..., Path]) -> None:
    history = load_history(make_run())
    assert len(history.steps) == 40
    assert history.num_skipped == 0
    assert history.pauses.evals_s == 1.0
    assert history.ended is not None


def test_items_of_a_step_done_again_count_once() -> None:
    history = history_of(CPU, step(1), step(2), step(3), replace(CPU, generation=1, first_step=2), step(3), step(4))
    assert sum(done.items for done in history.steps) == 4000
    assert history.first_steps == {1, 3}
    assert history.typical_step_s == pytest.approx(0.1)


def test_a_fault_is_no_restart_and_a_second_launch_is() -> None:
    started = [CPU, step(1), replace(CPU, generation=1, first_step=1), step(2), replace(CPU, first_step=2), step(3)]
    lines: list[tuple[dict[str, Any], Event]] = [({**encode(event), "at": 0.0}, event) for event in started]
    agent = [TimedEvent(1.0, RankLost(0, 1, "", 2, "killed")), TimedEvent(2.0, RanksClosed(1, 2, 0.9, 1, 2))]
    assert build_history(lines, agent=agent).restarts == (2,)
    assert build_history(lines).restarts == (1, 2), "without the agent's account every start is told"


def test_a_second_launch_does_not_count_the_night_between() -> None:
    lines: list[tuple[dict[str, Any], Event]] = [
        ({"at": at}, event)
        for at, event in (
            (0.0, CPU),
            (10.0, step(1)),
            (15.0, replace(CPU, generation=1, first_step=1)),
            (20.0, step(2)),
            (50_000.0, replace(CPU, first_step=2)),
            (50_010.0, step(3)),
        )
    ]
    assert build_history(lines).seconds == pytest.approx(30)


def test_a_generation_that_ended_by_agreement_did_not_end_the_run() -> None:
    assert history_of(CPU, step(1), RunEnded(1, "regrouped")).ended is None


def test_what_every_generation_says_as_it_begins_is_one_warning() -> None:
    again = replace(CPU, generation=1, first_step=1)
    history = history_of(CPU, Warned("no room"), step(1), Warned("bad", 1), again, Warned("no room"), Warned("bad", 2))
    assert [(one.what, one.times) for one in history.warnings] == [("no room", 1), ("bad", 2)]


def test_the_agents_record_is_read_beside_rank_0s(make_run: Callable[..., Path]) -> None:
    folder = make_run()
    recorder, agent = EventRecorder(folder, 0), EventRecorder(folder, AGENT)
    recorder.emit(Snapshotting(3, 1, 100, 0.001, "replica"))
    recorder.emit(Restored(39, "peer", 1, 0.1, ["slot 1 was torn"]))
    agent.emit(RankLost(0, 1, "", 40, "killed", "killed by SIGKILL", 0.01))
    agent.emit(RanksClosed(1, 40, 0.9, 1, 2, "data=2", {"fork": 0.2}))
    recorder.close()
    agent.close()
    history = load_history(folder)
    (fault,) = history.fault_history.faults
    assert fault.lost.rank == 1
    assert fault.closed == RanksClosed(1, 40, 0.9, 1, 2, "data=2", {"fork": 0.2})
    assert history.lost_s == pytest.approx(0.91)
    assert history.restored[0].notes == ["slot 1 was torn"]
    assert history.snapshots is not None
    assert history.snapshots.copies == "replica"
    assert len(history.steps) == 40


def test_counted_flops_are_the_runs() -> None:
    unknown = replace(CPU, flops_per_item=0.0)
    again = replace(unknown, generation=1, first_step=1)
    history = history_of(unknown, step(1), FlopsCounted(3e6, 4e6), again, step(2))
    assert [one.started.flops_per_item for one in history.starts] == [3e6, 3e6]
    assert history.started is not None
    assert history.started.hardware_flops_per_item == 4e6
