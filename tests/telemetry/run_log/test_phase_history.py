"""Phases of all ranks: shares, percentiles and the rank that is slowest; a step that was redone counts once."""

from __future__ import annotations

from pathlib import Path

import pytest

from closeranks.core.events import StepPhases
from closeranks.telemetry.reports.phase_section import describe, phase_section
from closeranks.telemetry.run_log.phase_history import collect, load_phases
from closeranks.telemetry.run_log.recorder import EventRecorder


def step(number: int, **phases: float) -> StepPhases:
    return StepPhases(number, sum(phases.values()), phases)


def test_shares_add_up_and_the_slowest_rank_is_named() -> None:
    history = collect(
        (rank, step(number, forward=0.1, backward=0.3 if rank == 1 else 0.1, vote=0.1 if rank == 1 else 0.3))
        for rank in range(2)
        for number in range(1, 11)
    )
    table = {row.name: row for row in history.table()}
    assert sum(row.share for row in table.values()) == pytest.approx(1)
    assert table["forward"].share == pytest.approx(0.2)
    assert (table["backward"].slowest_rank, table["backward"].slowest_s) == (1, pytest.approx(0.3))
    assert table["vote"].slowest_rank == 0
    assert (table["backward"].median_s, table["backward"].p99_s) == (pytest.approx(0.2), pytest.approx(0.3))
    assert "| backward | 40.0% | 200 ms | 300 ms | rank 1: 300 ms on average |" in phase_section(history)


def test_a_step_that_was_redone_counts_once_and_first_steps_do_not_count() -> None:
    history = collect([(0, step(1, compile=9.0)), (0, step(2, forward=5.0)), (0, step(2, forward=1.0))])
    (row,) = history.table(skipped=frozenset({1}))
    assert (row.name, row.share, row.median_s) == ("forward", 1, 1)


def test_nothing_recorded_is_nothing_shown(tmp_path: Path) -> None:
    assert phase_section(load_phases(tmp_path)) == ""


def test_a_file_that_was_cut_off_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    for rank in range(2):
        recorder = EventRecorder(tmp_path, rank)
        for number in (1, 2, 3):
            recorder.emit(step(number, forward=0.1, vote=0.1))
        recorder.close()
    path = tmp_path / "metrics" / "rank-00001.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    history = load_phases(tmp_path)
    assert {rank: len(steps) for rank, steps in history.steps.items()} == {0: 3, 1: 2}


def test_waits_are_named_by_axis_and_collective() -> None:
    assert describe("data.reduce_scatter") == "waiting for reduce-scatter (data axis)"
    assert describe("forward") == "forward"
