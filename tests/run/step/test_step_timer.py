"""What a session tells of itself while it runs: phases in order, ticks, and its own time."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from closeranks import Hook, Session
from closeranks.agent.detection.progress import SharedProgress, WorkerPhase, create_progress_fd
from closeranks.core.events import StepDone
from closeranks.core.system.linux import ThreadClock
from closeranks.run.step.step_timer import CpuStopwatch, CudaStopwatch, NullStopwatch, StepTimer, make_stopwatch
from closeranks.run.worker.agent_client import StandaloneClient, configure_worker
from closeranks.testing import run_world
from tests.cost import python_calls
from tests.run import small


class _Listener(StandaloneClient):
    """Writes down what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[int, str]] = []
        self.owned: list[tuple[float, int]] = []

    def progress(self, step: int, phase: int) -> None:
        self.told.append((step, WorkerPhase(phase).name))

    def micro_batch_done(self, *, counts: bool = True) -> None:
        self.told.append((-1, "tick" if counts else "sign"))

    def note_compute_time(self, seconds: float, pipeline_rank: int = 0) -> None:
        self.owned.append((seconds, pipeline_rank))

    def phases(self, step: int) -> list[str]:
        """In the order of a step, ticks where they fell, immediate repetitions once."""
        first = self.told.index((step, "HOOK"))
        later = [number for number, (at, _) in enumerate(self.told) if at > step]
        names = [name for _, name in self.told[first : later[0] if later else None]]
        return [name for number, name in enumerate(names) if number == 0 or name != names[number - 1] or name == "tick"]


@pytest.fixture
def listener() -> Iterator[_Listener]:
    listener = _Listener()
    configure_worker(agent_client=listener)
    yield listener
    configure_worker()


STEP = ["HOOK", "DATA", "COMPUTE", "tick", "tick", "HOOK", "REDUCE", "SNAPSHOT", "VOTE", "SNAPSHOT", "UPDATE"]


def test_a_step_passes_through_its_phases(tmp_path: Path, listener: _Listener) -> None:
    small.train(tmp_path)
    assert listener.phases(1) == STEP
    assert listener.phases(2) == STEP
    assert len(listener.owned) == 4
    assert all(seconds > 0 and pipeline_rank == 0 for seconds, pipeline_rank in listener.owned)


def test_evaluating_and_saving_are_phases_of_the_step_before(tmp_path: Path, listener: _Listener) -> None:
    tables = {"train": {"eval_every": 2}, "checkpoint": {"save": True}}
    small.train(tmp_path, eval_data=small.dataset(16), **tables)
    assert listener.phases(2) == [*STEP, "EVALUATE", "tick", "tick", "tick", "tick"]
    assert "SAVE" in listener.phases(4)


class _Witness(Hook):
    """Looks at its own phase from inside."""

    def __init__(self, listener: _Listener) -> None:
        self._listener = listener

    def on_step(self, session: Session, step: StepDone) -> None:
        assert self._listener.told[-1] == (step.step, "HOOK")


def test_hooks_are_a_phase_of_their_own(tmp_path: Path, listener: _Listener) -> None:
    small.train(tmp_path, hooks=[_Witness(listener)])
    assert listener.phases(2) == [*STEP, "HOOK", "UPDATE"]


def test_ones_own_loop_is_free_before_the_first_batch_and_after_the_last(tmp_path: Path, listener: _Listener) -> None:
    with small.open_session(tmp_path) as session:
        for step in session:
            assert listener.told[-1] == (step.index + 1, "HOOK")
            for batch in step:
                assert listener.told[-1][1] in ("COMPUTE", "tick")
                step.backward(session.loss(batch))
            assert listener.told[-1] == (step.index + 1, "HOOK")


def test_a_compiler_that_begins_in_the_middle_is_a_phase_of_its_own() -> None:
    import torch._dynamo  # a job that compiles has imported it

    listener = _Listener()
    pace = StepTimer(listener, NullStopwatch())
    pace.begin(5)
    pace.start()

    @torch.compile(backend="eager")
    def double(x: Tensor) -> Tensor:
        return x * 2

    double(torch.ones(3))
    assert listener.told == [(5, "HOOK"), (5, "COMPUTE"), (5, "COMPILE"), (5, "COMPUTE")]
    double(torch.ones(3))
    assert len(listener.told) == 4
    pace.close()
    torch.compiler.reset()
    double(torch.ones(3))
    assert len(listener.told) == 4


# --- own time


def test_the_threads_clock_stands_while_it_sleeps_and_runs_while_it_works() -> None:
    clock = ThreadClock()
    slept = []
    for _ in range(5):  # one that wakes on a busy machine waits for a processor, and that counts
        before = clock()
        threading.Event().wait(0.3)
        slept.append(clock() - before)
    assert min(slept) < 0.1
    before, started_at = clock(), time.perf_counter()
    while time.perf_counter() - started_at < 0.3:
        pass
    assert clock() - before == pytest.approx(0.3, abs=0.15)
    clock.close()
    clock.close()


@pytest.mark.world
def test_the_threads_clock_counts_what_other_processes_took_of_the_processor() -> None:
    """Three on one processor: each runs a third of the time, and is ready all the time."""
    shares = run_world(_crowd, 3)
    assert all(ready > 0.8 for ready, _ in shares)
    assert all(ran < 0.6 for _, ran in shares)


def _crowd() -> tuple[float, float]:
    """The share of a second for which this process was ready to run, and for which it ran."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    clock = ThreadClock()
    dist.barrier()
    started_at, ready, ran = time.perf_counter(), clock(), time.thread_time()
    while (passed := time.perf_counter() - started_at) < 1.0:
        pass
    return (clock() - ready) / passed, (time.thread_time() - ran) / passed


def test_which_watch_is_taken() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    assert isinstance(make_stopwatch(cuda, is_independent=False), NullStopwatch)
    assert isinstance(make_stopwatch(cuda, is_independent=True), CudaStopwatch)
    for is_independent in (True, False):
        watch = make_stopwatch(cpu, is_independent=is_independent)
        assert isinstance(watch, CpuStopwatch)
        watch.start()
        watch.stop(2)
        assert len(watch.pop_times()) == 1
        assert list(watch.pop_times()) == []
        watch.close()


def test_own_time_is_per_micro_batch() -> None:
    times = iter([10.0, 16.0])
    watch = CpuStopwatch(lambda: next(times))
    watch.start()
    watch.stop(3)
    assert watch.pop_times() == [2.0]


class _Sleeper(nn.Module):
    """Holds rank 1 up in its forward."""

    def __init__(self, is_slow: bool) -> None:
        super().__init__()
        self.inner = small.net()
        self.is_slow = is_slow

    def forward(self, x: Tensor) -> Tensor:
        if self.is_slow:
            time.sleep(0.2)
        answer: Tensor = self.inner(x)
        return answer


def _owned(folder: Path, tables: dict[str, Any]) -> float:
    """The least that a step of this rank took, in its own time."""
    listener = _Listener()
    configure_worker(agent_client=listener)
    small.train(folder, model=_Sleeper(dist.get_rank() == 1), **tables)
    return min(seconds for seconds, _ in listener.owned)


@pytest.mark.world
def test_a_rank_that_holds_all_others_up_has_the_time_alone(tmp_path: Path) -> None:
    tables = {"train": {"steps": 4, "global_batch": 12}}
    own = run_world(_owned, 3, tmp_path, tables)
    assert own[1] > 0.2
    assert max(own[0], own[2]) < 0.1


@pytest.mark.world
def test_waiting_in_collectives_inside_the_forward_is_nobodys_own_time(tmp_path: Path) -> None:
    tables = {"train": {"steps": 4, "global_batch": 12}, "layout": {"zero": 3}}
    own = run_world(_owned, 3, tmp_path, tables)
    assert max(own) < 0.15


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_devices_time_is_told_steps_later_without_waiting() -> None:
    watch, matrix = CudaStopwatch(), torch.ones(4096, 4096, device="cuda")
    watch.start()
    for _ in range(50):
        matrix @ matrix
    watch.stop(1)
    first = list(watch.pop_times())
    torch.cuda.synchronize()
    told = first + list(watch.pop_times())
    assert first == []
    assert len(told) == 1
    assert told[0] > 0.001


def test_all_of_it_costs_little() -> None:
    """A step of one micro-batch with real shared memory."""
    word = SharedProgress(create_progress_fd())

    class _Direct(StandaloneClient):
        def progress(self, step: int, phase: int) -> None:
            word.write(step, phase)

        def micro_batch_done(self, *, counts: bool = True) -> None:
            word.micro_batch_done(counts=counts)

        def note_compute_time(self, seconds: float, pipeline_rank: int = 0) -> None:
            word.note_compute_time(seconds, pipeline_rank)

    pace = StepTimer(_Direct(), make_stopwatch(torch.device("cpu"), is_independent=False))

    def step() -> None:
        pace.begin(7)
        pace.enter_phase(WorkerPhase.DATA)
        pace.start()
        pace.micro_batch_done()
        pace.stop(1)
        for phase in (
            WorkerPhase.REDUCE,
            WorkerPhase.SNAPSHOT,
            WorkerPhase.VOTE,
            WorkerPhase.SNAPSHOT,
            WorkerPhase.UPDATE,
        ):
            pace.enter_phase(phase)
        pace.report_times()

    assert python_calls(step) < 1500, "some 300"
    pace.close()
