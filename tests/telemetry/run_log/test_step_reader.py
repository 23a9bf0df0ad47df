"""A long run is read through its index: the same sums as step by step, whatever state the index is in."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from closeranks.core.events import StepDone, StepPhases, Warned
from closeranks.telemetry.run_log import step_reader
from closeranks.telemetry.run_log.phase_history import load_phases
from closeranks.telemetry.run_log.recorder import EventRecorder
from closeranks.telemetry.run_log.resource_history import load_resources
from closeranks.telemetry.run_log.run_folder import RunFolder
from closeranks.telemetry.run_log.run_history import RunHistory, load_history
from closeranks.telemetry.run_log.step_reader import RankLog
from tests.telemetry.conftest import step
from tests.telemetry.run_log.long_run import PHASES, record_session, small_blocks


def record_run(folder: Path) -> None:
    """Three sessions: the first is killed, the second ends in order, the third does steps of both again."""
    record_session(folder, 1, 400, is_killed=True)
    record_session(folder, 391, 700, 1)
    record_session(folder, 375, 1100, 2)


def assert_same(found: RunHistory, exact: RunHistory) -> None:
    assert found.num_steps == exact.num_steps == len(exact.steps)
    assert found.num_skipped == exact.num_skipped
    assert found.throughput().items == exact.throughput().items
    assert found.throughput().seconds == pytest.approx(exact.throughput().seconds)
    assert found.throughput().first_steps_s == exact.throughput().first_steps_s
    assert sum(block.num_bad for block in found.blocks) == exact.num_steps
    assert found.first_steps == exact.first_steps
    assert (found.steps[0], found.steps[-1]) == (exact.steps[0], exact.steps[-1])
    assert (found.starts, found.evals, found.saves, found.warnings, found.ended) == (
        exact.starts,
        exact.evals,
        exact.saves,
        exact.warnings,
        exact.ended,
    )
    by_number = {one.step: one for one in exact.steps}
    assert all(by_number[one.step] == one for one in found.steps), "of steps done again, the last time counts"
    firsts = [block.first for block in found.blocks]
    assert firsts == sorted(firsts)
    lowest = min(block.loss["low"] for block in found.blocks if block.loss)
    assert lowest == min(one.loss for one in exact.taken)


def read_bytes_of(call: Callable[[], object]) -> int:
    """What a call reads, of files and of the page cache alike."""

    def so_far() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    before = so_far()
    call()
    return so_far() - before


def test_a_long_run_is_read_through_its_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch)
    record_run(tmp_path)
    found, exact = load_history(tmp_path), load_history(tmp_path, all_steps=True)
    assert exact.num_steps == 1100
    assert not exact.blocks
    assert_same(found, exact)
    assert len(found.steps) < 300
    assert found.notes == (
        f"of 1,100 steps, {len(found.steps)} were read one by one, evenly spread; sums and curves are of all steps",
    )
    assert exact.notes == ()


def test_a_short_run_is_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch, whole_bytes=10 << 20)
    record_run(tmp_path)
    RunFolder(tmp_path).index(0).write_bytes(b"nobody opens it")
    assert load_history(tmp_path) == load_history(tmp_path, all_steps=True)


def _missing(index: bytes, rng: random.Random) -> bytes:
    return b""


def _truncated(index: bytes, rng: random.Random) -> bytes:
    return index[: rng.randrange(len(index))]


def _fuzzed(index: bytes, rng: random.Random) -> bytes:
    content = bytearray(index)
    for _ in range(20):
        content[rng.randrange(len(content))] = rng.randrange(256)
    return bytes(content)


def _shuffled(index: bytes, rng: random.Random) -> bytes:
    lines = index.splitlines(keepends=True)
    rng.shuffle(lines)
    return b"".join(lines)


def _random(index: bytes, rng: random.Random) -> bytes:
    return rng.randbytes(len(index))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("damage", [_missing, _truncated, _fuzzed, _shuffled, _random])
def test_what_the_index_lacks_is_read_event_by_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[bytes, random.Random], bytes], seed: int
) -> None:
    small_blocks(monkeypatch)
    monkeypatch.setattr(step_reader, "_NOTED_BYTES", 0)
    record_run(tmp_path)
    index = RunFolder(tmp_path).index(0)
    index.write_bytes(damage(index.read_bytes(), random.Random(seed)))
    found = load_history(tmp_path)
    assert_same(found, load_history(tmp_path, all_steps=True))
    if damage is _missing:
        assert found.notes[1].startswith("the index of rank 0 covers 0.0% of its metrics: the other events, ")
    if damage is _fuzzed:
        assert "lines of it damaged or of other metrics): the other events" in found.notes[1]


def test_an_index_that_is_no_file_is_said_and_read_past(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch)
    record_run(tmp_path)
    index = RunFolder(tmp_path).index(0)
    index.unlink()
    os.mkfifo(index)
    found = load_history(tmp_path)
    assert_same(found, load_history(tmp_path, all_steps=True))
    assert "(1 line of it damaged or of other metrics)" in found.notes[1]


def test_the_index_of_other_metrics_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch)
    record_run(tmp_path / "one")
    record_session(tmp_path / "two", 1, 900, 7)
    RunFolder(tmp_path / "one").index(0).replace(RunFolder(tmp_path / "two").index(0))
    assert_same(load_history(tmp_path / "two"), load_history(tmp_path / "two", all_steps=True))


def test_a_run_that_goes_on_is_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch)
    record_session(tmp_path, 1, 600)
    recorder = EventRecorder(tmp_path, 0)
    for number in range(601, 700):
        recorder.emit(step(number))
        if number % 9 == 0:
            found = load_history(tmp_path)
            assert (found.num_steps, found.steps[-1].step) == (number, number)
    recorder.close()


def test_most_of_a_long_file_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch)
    record_session(tmp_path, 1, 6000)
    size = RunFolder(tmp_path).metrics(0).stat().st_size
    log = RankLog(RunFolder(tmp_path).metrics(0))
    read = read_bytes_of(lambda: [list(stretch.lines) for stretch in log.stretches("others", "warnings")])
    assert read < size / 4
    RunFolder(tmp_path).index(0).unlink()
    assert read_bytes_of(lambda: RankLog(RunFolder(tmp_path).metrics(0))) >= size, "control"


def test_phases_and_resources_of_a_long_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record_run(tmp_path)
    exact_rows, exact = load_phases(tmp_path).table(), load_resources(tmp_path)
    small_blocks(monkeypatch)
    RunFolder(tmp_path).index(0).unlink()  # its blocks are too large for this test
    phases, resources = load_phases(tmp_path), load_resources(tmp_path)
    assert sum(block.num_phases for block in phases.blocks[0]) == pytest.approx(1100, abs=20)
    assert sum(map(len, phases.steps.values())) < 300
    rows = {row.name: row for row in phases.table()}
    for row in exact_rows:
        assert rows[row.name].share == pytest.approx(row.share)
        assert rows[row.name].median_s == pytest.approx(row.median_s)
        assert rows[row.name].mean_s == pytest.approx(PHASES[row.name])
    assert resources.memory == exact.memory
    assert resources.share < 0.5
    energy_j = sum(one.used.gpu["energy_j"] for one in resources.records) / resources.share
    assert energy_j == pytest.approx(sum(one.used.gpu["energy_j"] for one in exact.records))


def test_other_ranks_are_read_as_far_as_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in range(8):
        recorder = EventRecorder(tmp_path, rank)
        for number in range(1, 600):
            recorder.emit(StepDone(number))
            recorder.emit(StepPhases(number, 0.1, PHASES))
        recorder.emit(Warned(f"of rank {rank}"))
        recorder.close()
    run = RunFolder(tmp_path)
    assert len(load_phases(tmp_path).steps) == 8
    indexes = sum(path.stat().st_size for path in tmp_path.glob("metrics/*.index"))
    monkeypatch.setattr(step_reader, "OTHER_BYTES", indexes)
    read = load_phases(tmp_path)
    assert len(read.steps) == 8, "their indexes alone fit"
    assert {warning.what for warning in load_history(tmp_path).warnings} == {f"of rank {rank}" for rank in range(8)}
    monkeypatch.setattr(step_reader, "OTHER_BYTES", indexes // 2)
    assert 2 < len(load_phases(tmp_path).steps) < 8
    for rank in range(1, 8):
        run.index(rank).unlink()
    assert len(load_phases(tmp_path).steps) == 1, "without them, these ranks would have to be read whole"
