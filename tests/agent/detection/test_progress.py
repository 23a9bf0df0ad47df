"""The progress word, also of a process that was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from closeranks.agent.detection import progress
from closeranks.agent.detection.progress import (
    PHASE_WORDS,
    STEADY,
    SharedProgress,
    WorkerPhase,
    WorkerProgress,
    create_progress_fd,
)


@pytest.fixture
def shared() -> Iterator[SharedProgress]:
    fd = create_progress_fd()
    shared = SharedProgress(fd)
    os.close(fd)
    yield shared
    shared.close()


def test_a_fresh_word_is_at_no_step(shared: SharedProgress) -> None:
    fresh = shared.read()
    assert fresh == WorkerProgress(None, WorkerPhase.START, fresh.at)
    before = time.monotonic()
    shared.write(2**40, WorkerPhase.SAVE)
    seen = shared.read()
    assert (seen.step, seen.phase, seen.snapshot_step) == (2**40, WorkerPhase.SAVE, None)
    assert before - 1e-6 <= seen.at <= time.monotonic()


def test_what_a_worker_notes_can_be_read(shared: SharedProgress) -> None:
    shared.write(3, WorkerPhase.COMPUTE)
    shared.micro_batch_done()
    shared.micro_batch_done()
    shared.micro_batch_done(counts=False)
    shared.note_snapshot(2)
    shared.note_compute_time(0.5, pipeline_rank=1)
    shared.note_compute_time(0.25, pipeline_rank=1)
    seen = shared.read()
    assert (
        seen.micro_batches_done,
        seen.snapshot_step,
        seen.compute_s,
        seen.compute_sum_s,
        seen.num_timed,
        seen.pipeline_rank,
    ) == (2, 2, 0.25, 0.75, 2, 1)
    shared.write(3, WorkerPhase.REDUCE)
    assert shared.read().micro_batches_done == 2
    shared.write(4, WorkerPhase.COMPUTE)
    assert shared.read().micro_batches_done == 0


def test_a_tick_is_a_sign_of_life(shared: SharedProgress) -> None:
    shared.write(3, WorkerPhase.COMPUTE)
    at = shared.read().at
    shared.micro_batch_done(counts=False)
    assert shared.read().at > at


class _Clock:
    """``time.monotonic_ns`` as the test wants it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ns = time.monotonic_ns()
        monkeypatch.setattr(time, "monotonic_ns", lambda: self.now_ns)

    def visit(self, shared: SharedProgress, phase: WorkerPhase, *gaps_s: float) -> None:
        """A phase in which so much time goes by until each tick, and until the next phase."""
        shared.write(1, phase)
        for gap_s in gaps_s[:-1]:
            self.now_ns += int(gap_s * 1e9)
            shared.micro_batch_done()
        self.now_ns += int(gaps_s[-1] * 1e9)
        shared.write(1, WorkerPhase.HOOK)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    return _Clock(monkeypatch)


def test_a_phase_is_known_when_it_was_seen_to_its_end(clock: _Clock, shared: SharedProgress) -> None:
    shared.write(1, WorkerPhase.COMPUTE)
    assert WorkerPhase.COMPUTE not in shared.read().longest
    clock.visit(shared, WorkerPhase.DATA, 2.0)
    assert shared.read().longest[WorkerPhase.DATA] == pytest.approx(2.0)


def test_signs_of_life_part_a_long_phase(clock: _Clock, shared: SharedProgress) -> None:
    clock.visit(shared, WorkerPhase.EVALUATE, 1.0, 3.0, 2.0)
    assert shared.read().longest[WorkerPhase.EVALUATE] == pytest.approx(3.0)


def test_the_first_visit_to_a_steady_phase_is_replaced_by_the_second(clock: _Clock, shared: SharedProgress) -> None:
    clock.visit(shared, WorkerPhase.COMPUTE, 60.0)
    assert shared.read().longest[WorkerPhase.COMPUTE] == pytest.approx(60.0)
    clock.visit(shared, WorkerPhase.COMPUTE, 0.1)
    assert shared.read().longest[WorkerPhase.COMPUTE] == pytest.approx(0.1)


def test_an_outlier_is_remembered_and_then_forgotten_after_some_tens_of_steps(
    clock: _Clock, shared: SharedProgress
) -> None:
    for seconds in (0.1, 0.1, 10.0, 0.1):
        clock.visit(shared, WorkerPhase.COMPUTE, seconds)
    assert shared.read().longest[WorkerPhase.COMPUTE] > 9.0
    for _ in range(100):
        clock.visit(shared, WorkerPhase.COMPUTE, 0.1)
    assert shared.read().longest[WorkerPhase.COMPUTE] < 0.2


@pytest.mark.parametrize("phase", sorted(set(WorkerPhase) - STEADY - {WorkerPhase.HOOK}))
def test_what_depends_on_others_is_never_forgotten(clock: _Clock, shared: SharedProgress, phase: WorkerPhase) -> None:
    for seconds in (10.0, *[0.1] * 200):
        clock.visit(shared, phase, seconds)
    assert shared.read().longest[phase] == pytest.approx(10.0)


class _Traced:
    """The word's memory, with what was touched in which order."""

    def __init__(self, memory: Any) -> None:
        self._memory = memory
        self.touched: list[int] = []

    def __setitem__(self, place: int, value: int) -> None:
        self.touched.append(place)
        self._memory[place] = value

    def __getitem__(self, place: int) -> int:
        self.touched.append(place)
        found: int = self._memory[place]
        return found

    def release(self) -> None:
        self._memory.release()


def test_a_phase_is_never_seen_with_an_older_time_than_its_own(shared: SharedProgress) -> None:
    """The agent reads at any moment: after a long phase, the next one with the old time would look hung."""
    at, phase = progress._AT, progress._PHASE
    shared._ints = traced = _Traced(shared._ints)  # type: ignore[assignment]
    shared.write(1, WorkerPhase.UPDATE)
    assert traced.touched.index(at) < traced.touched.index(phase)
    traced.touched.clear()
    shared.read()
    assert traced.touched.index(phase) < traced.touched.index(at)


def test_the_last_words_of_a_killed_process_can_be_read() -> None:
    fd = create_progress_fd()
    code = (
        "import os, sys; from closeranks.agent.detection.progress import SharedProgress;"
        "SharedProgress(int(sys.argv[1])).write(41, 5); os.kill(os.getpid(), 9)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(fd)], pass_fds=(fd,))
    assert process.wait() == -signal.SIGKILL
    shared = SharedProgress(fd)
    assert (shared.read().step, shared.read().phase) == (41, WorkerPhase.REDUCE)
    shared.close()
    os.close(fd)


def test_a_foreign_descriptor_is_refused() -> None:
    fd = os.memfd_create("foreign")
    os.ftruncate(fd, 4096)
    with pytest.raises(ValueError, match="not a worker's progress memory"):
        SharedProgress(fd)
    os.close(fd)


def test_every_phase_has_words() -> None:
    assert set(PHASE_WORDS) == set(WorkerPhase)
