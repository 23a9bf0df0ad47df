"""The index that a recorder writes: whole blocks of what is in the metrics, whatever becomes of process and disk."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from closeranks.core.events import Event, StepPhases, Warned
from closeranks.telemetry.run_log import index_writer
from closeranks.telemetry.run_log.recorder import AGENT, EventRecorder, read_events
from closeranks.telemetry.run_log.run_folder import RunFolder
from closeranks.telemetry.run_log.step_blocks import STEPS, StepBlock, parse_index_line
from tests.cost import python_calls
from tests.telemetry.conftest import CPU, step
from tests.telemetry.run_log.long_run import PHASES, lines_at, record_session, small_blocks


def blocks_in(folder: Path) -> list[StepBlock]:
    found = [parse_index_line(line) for line in RunFolder(folder).index(0).read_bytes().splitlines(keepends=True)]
    assert None not in found
    return [block for block in found if block is not None]


def test_blocks_cover_the_metrics_without_a_gap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch)
    record_session(tmp_path, 1, 130)
    metrics, blocks = RunFolder(tmp_path).metrics(0), blocks_in(tmp_path)
    assert [block.begin for block in blocks] == [0, *(block.end for block in blocks[:-1])]
    assert blocks[-1].end == metrics.stat().st_size
    assert [block.last for block in blocks] == [4, 16, 32, 48, 64, 80, 96, 112, 128, 130]
    assert sum(block.num for block in blocks) == sum(block.num_phases for block in blocks) == 130
    others = [name for block in blocks for name in lines_at(metrics, block.others)]
    assert others == ["run_started", *["eval", "saved"] * 2, "memory", "run_ended"]
    assert [name for block in blocks for name in lines_at(metrics, block.warnings)] == ["warning"] * 2
    assert [name for block in blocks for name in lines_at(metrics, block.samples)] == ["resources"] * 26
    assert sum(block.energy_j for block in blocks) == 260.0


def test_what_was_complete_survives_sigkill_and_a_continued_run_goes_on(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys; from pathlib import Path\n"
        "from closeranks.core.events import StepDone\n"
        "from closeranks.telemetry.run_log.recorder import EventRecorder\n"
        "recorder = EventRecorder(Path(sys.argv[1]), 0)\n"
        "for step in range(1, 601): recorder.emit(StepDone(step=step))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert [(block.first, block.last) for block in blocks_in(tmp_path)] == [(1, STEPS), (STEPS + 1, 2 * STEPS)]
    size = RunFolder(tmp_path).metrics(0).stat().st_size
    record_session(tmp_path, 601, 610)
    *_, last = blocks_in(tmp_path)
    assert (last.begin, last.first, last.last, last.start) == (size, 601, 610, 600)


def test_a_disk_that_refuses_metrics_leaves_a_gap_and_no_wrong_block(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.metrics(0).parent.mkdir()
    run.metrics(0).symlink_to("/dev/full")
    recorder = EventRecorder(tmp_path, 0)
    for number in range(1, 300):
        recorder.emit(step(number))
    assert not run.index(0).exists()
    run.metrics(0).unlink()
    time.sleep(0.5)  # as long as an attempt is not repeated
    for number in range(300, 2 * STEPS + 1):
        recorder.emit(step(number))
    recorder.close()
    (block,) = blocks_in(tmp_path)
    assert block.last == 2 * STEPS
    whole = run.metrics(0).read_bytes()
    assert block.end == len(whole)
    assert whole[: block.begin].endswith(b"\n")
    assert whole[block.begin :].count(b'"event": "step"') == block.num


def test_lines_of_someone_else_in_the_metrics_leave_a_gap(tmp_path: Path) -> None:
    recorder, other = EventRecorder(tmp_path, 0), EventRecorder(tmp_path, 0)
    for number in range(1, 3 * STEPS + 1):
        recorder.emit(step(number))
        if number == STEPS + 7:
            other.emit(Warned("I live"))
    recorder.close()
    assert [(block.first, block.last) for block in blocks_in(tmp_path)] == [(1, STEPS), (2 * STEPS + 1, 3 * STEPS)]


def test_metrics_that_are_removed_are_indexed_anew(tmp_path: Path) -> None:
    run, recorder = RunFolder(tmp_path), EventRecorder(tmp_path, 0)
    for number in range(1, 4 * STEPS + 1):
        if number == STEPS + 7:
            run.metrics(0).unlink()
        recorder.emit(step(number))
    recorder.close()
    first, *others = blocks_in(tmp_path)
    assert (first.begin, first.last) == (0, STEPS)
    assert [(block.first, block.last) for block in others] == [
        (2 * STEPS + 1, 3 * STEPS),
        (3 * STEPS + 1, 4 * STEPS),
    ]
    assert others[-1].end == run.metrics(0).stat().st_size


def test_a_failure_of_the_index_never_reaches_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> bytes:
        raise ValueError("no pen")

    monkeypatch.setattr(index_writer, "to_index_line", refuse)
    recorder = EventRecorder(tmp_path, 0)
    for number in range(1, 2 * STEPS + 1):
        recorder.emit(step(number))
    recorder.close()
    assert len(list(read_events(RunFolder(tmp_path).metrics(0)))) == 2 * STEPS
    assert not RunFolder(tmp_path).index(0).exists()


def test_something_in_the_way_of_the_index_is_no_hindrance(tmp_path: Path) -> None:
    RunFolder(tmp_path).index(0).mkdir(parents=True)
    recorder = EventRecorder(tmp_path, 0)
    for number in range(1, 2 * STEPS + 1):
        recorder.emit(step(number))
    recorder.close()
    assert len(list(read_events(RunFolder(tmp_path).metrics(0)))) == 2 * STEPS


def test_a_run_too_short_for_a_block_and_the_agent_have_no_index(tmp_path: Path) -> None:
    for rank in (0, AGENT):
        EventRecorder(tmp_path, rank).close()
    assert not list((tmp_path / "metrics").glob("*.index"))


def test_indexing_is_cheap(tmp_path: Path) -> None:
    """Measured: 3 to 4 us a step where nobody else is at work, with a step's phases."""
    recorder, phases = EventRecorder(tmp_path, 0), StepPhases(1, 0.1, PHASES)
    writer = recorder._index
    assert writer is not None
    events: list[tuple[Event, Event]] = [(step(number), phases) for number in range(1, STEPS + 1)]
    recorder.emit(CPU)

    def add_all() -> None:
        for pair in events:
            for event in pair:
                writer.add(event, 1.0, bytes(100))

    assert python_calls(add_all, number=1, repeat=20) / STEPS < 200, "some 40"
    recorder.close()
