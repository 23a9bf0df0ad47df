"""Processes that read: one fork server serves all tests here, since importing torch takes seconds."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from closeranks.core.errors import CloseranksError, DataError, SetupError, UserError
from closeranks.data.loading.batch_reader import BatchReader, LoadedBatch, ReadPlan
from closeranks.data.loading.fork_server_client import ForkServerClient
from closeranks.data.loading.messages import RemoteTraceback
from closeranks.data.loading.quarantine import BadSample
from closeranks.data.loading.read_settings import ReadSettings
from closeranks.data.loading.worker_pool import LoaderStopped, LoaderWorkerPool
from closeranks.data.sampling.order import BatchSchedule, FullOrder
from tests.data.doubles import (
    CountingSource,
    DrawingSource,
    DyingSource,
    FailingSource,
    HeldSource,
    LocalSource,
    LoggedSource,
    MixedSource,
    SlowSource,
    StoredSource,
    StuckSource,
)

STEPS = 5


@pytest.fixture(scope="module")
def fork_server() -> Iterator[ForkServerClient]:
    one = ForkServerClient()
    yield one
    assert processes_of(one) == []
    one.close()
    assert not one.is_alive


def plan_of(source: CountingSource, steps: int = STEPS, known: Any = None, **settings: Any) -> ReadPlan:
    """Four micro-batches of two samples a step."""
    schedule = BatchSchedule.for_steps(len(source), 8, 2, steps)
    return ReadPlan(source, FullOrder(len(source), 5), schedule, settings=ReadSettings(**settings), known=known or {})


@contextlib.contextmanager
def pool_of(plan: ReadPlan, fork_server: ForkServerClient, step: int = 0) -> Iterator[LoaderWorkerPool]:
    pool = LoaderWorkerPool(plan, step, fork_server)
    try:
        yield pool
    finally:
        pool.close()


def all_of(plan: ReadPlan, fork_server: ForkServerClient, step: int = 0) -> list[list[LoadedBatch]]:
    with pool_of(plan, fork_server, step) as pool:
        return [pool.read(later) for later in range(step, plan.schedule.num_steps)]


def processes_of(fork_server: ForkServerClient) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{fork_server.pid}/task/{fork_server.pid}/children").read_text().split()]


def until(holds: Callable[[], bool], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def sample_at(plan: ReadPlan, step: int, micro_batch: int) -> int:
    return int(plan.order.at(torch.tensor([step * 8 + micro_batch * 2]).numpy())[0])


def ids(loaded: list[LoadedBatch]) -> list[int]:
    return [int(n) for one in loaded for n in one.batch["id"]]


@pytest.mark.parametrize(("workers", "prefetch"), [(1, 0), (1, 1), (3, 1), (3, 4)])
def test_processes_read_what_the_rank_itself_would(fork_server: ForkServerClient, workers: int, prefetch: int) -> None:
    plan = plan_of(CountingSource(20), workers=workers, prefetch=prefetch)
    reader = BatchReader(plan, 0)
    alone = [reader.read(step) for step in range(STEPS)]
    read = all_of(plan, fork_server)
    assert [ids(step) for step in read] == [ids(step) for step in alone]
    assert [[one.micro_batch for one in step] for step in read] == [[one.micro_batch for one in s] for s in alone]
    assert all(
        torch.equal(a.batch["x"], b.batch["x"])
        for s, t in zip(read, alone, strict=True)
        for a, b in zip(s, t, strict=True)
    )
    assert [ids(step) for step in all_of(plan, fork_server, step=3)] == [ids(step) for step in alone[3:]]
    assert processes_of(fork_server) == []


def test_batches_of_any_kind_and_size_arrive(fork_server: ForkServerClient) -> None:
    """Some are sixty times the size of others."""
    plan = plan_of(MixedSource(20), workers=2)
    reader = BatchReader(plan, 0)
    for step, read in enumerate(all_of(plan, fork_server)):
        for one, other in zip(read, reader.read(step), strict=True):
            for name in ("id", "wide", "half", "is_even", "strided", "empty"):
                assert torch.equal(one.batch[name], other.batch[name])
            assert one.batch["text"] == other.batch["text"]


def test_batches_stay_valid_after_the_crew_is_gone(fork_server: ForkServerClient) -> None:
    plan = plan_of(CountingSource(20), steps=12, workers=2)
    read = all_of(plan, fork_server)
    assert [ids(step) for step in read] == [ids(BatchReader(plan, step).read(step)) for step in range(12)]


def test_memory_is_bounded_by_what_is_read_ahead(fork_server: ForkServerClient) -> None:
    plan = plan_of(CountingSource(20), steps=60, workers=2, prefetch=2)
    with pool_of(plan, fork_server) as pool:
        for step in range(60):
            pool.read(step)
        num_slots = sum(len(process.batches._slots) for process in pool._processes)
        assert num_slots <= (2 + 1 + 1) * 4  # ahead, asked for, and not yet let go of


def test_nobody_reads_further_ahead_than_told(fork_server: ForkServerClient, tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.touch()
    with pool_of(plan_of(LoggedSource(20, str(path)), steps=20, workers=2, prefetch=2), fork_server) as pool:
        for step in range(20):
            allowed = 4 * min(20, step + 2)
            until(lambda most=allowed: len(path.read_text()) >= most)  # type: ignore[misc]
            assert len(path.read_text()) == allowed
            pool.read(step)


def test_what_a_dataset_draws_does_not_depend_on_the_number_of_processes(fork_server: ForkServerClient) -> None:
    drawn = [
        [
            one.batch["drawn"][0].tolist()
            for step in all_of(plan_of(DrawingSource(20), workers=workers), fork_server)
            for one in step
        ]
        for workers in (1, 3)
    ]
    assert drawn[0] == drawn[1]
    assert len({tuple(values) for values in drawn[0]}) == STEPS * 4


def test_arrays_of_a_dataset_in_memory_are_the_processes_own(fork_server: ForkServerClient) -> None:
    source = HeldSource(20)
    before = source.array.copy()
    for step in all_of(plan_of(source, workers=1), fork_server):
        for one in step:
            assert torch.equal(one.batch["tensor"], source.tensor[one.batch["id"]])
    assert (source.array == before).all()


def test_bad_samples_are_told(fork_server: ForkServerClient) -> None:
    known = {7: BadSample(7, "there", "known")}
    plan = plan_of(StoredSource(20, damaged=(3,), nan=(11,)), known=known, workers=2, on_bad="skip")
    reader = BatchReader(plan, 0)
    for step, read in enumerate(all_of(plan, fork_server)):
        alone = reader.read(step)
        assert [one.skipped for one in read] == [one.skipped for one in alone]
        assert [one.micro_batch for one in read] == [one.micro_batch for one in alone]
        assert ids(read) == ids(alone)


def test_times_come_along(fork_server: ForkServerClient) -> None:
    read = all_of(plan_of(SlowSource(20, "decode", 0.01), steps=2, workers=2), fork_server)
    assert all(one.times.decode_s >= 0.01 for step in read for one in step)


# What goes wrong


@pytest.mark.parametrize(
    ("error", "kind", "match"),
    [
        (OSError("torn"), DataError, r"of failing raised OSError: torn \(.*doubles.py:\d+\)"),
        (SetupError("the disk is gone", "Mount it."), SetupError, "the disk is gone. Mount it."),
        (EOFError("short"), DataError, "raised EOFError: short"),
        (SystemExit(4), DataError, "reading step 2 of failing raised SystemExit: 4"),
    ],
)
def test_an_error_comes_at_its_step_with_its_traceback_and_ever_after(
    fork_server: ForkServerClient, error: BaseException, kind: type[CloseranksError], match: str
) -> None:
    bad = sample_at(plan_of(CountingSource(40)), 1, 2)
    with pool_of(plan_of(FailingSource(40, bad, error), workers=3), fork_server) as pool:
        assert len(pool.read(0)) == 4
        for _ in range(2):
            with pytest.raises(kind, match=match) as caught:
                pool.read(1)
            cause = caught.value.__cause__
            assert isinstance(cause, RemoteTraceback)
            assert "in process 1 of 3 that read failing\n" in str(cause)
            assert "raise self._error" in str(cause)


@pytest.mark.parametrize(
    ("status", "match"),
    [(3, "process 3 of 3 that read dying exited with code 3"), (-signal.SIGKILL, "was killed by SIGKILL; if nobody")],
)
def test_a_process_that_dies_is_named_with_its_end(fork_server: ForkServerClient, status: int, match: str) -> None:
    bad = sample_at(plan_of(CountingSource(40)), 0, 2)
    with pool_of(plan_of(DyingSource(40, bad, status), workers=3, prefetch=1), fork_server) as pool:
        for _ in range(2):
            with pytest.raises(CloseranksError, match=match) as caught:
                pool.read(0)
    assert caught.value.exit_code == 1  # no mistake of anybody's, as the death of a worker is none
    assert "lower data.workers or data.prefetch" in caught.value.fix


def test_a_process_killed_from_outside_is_found_by_the_next_read(fork_server: ForkServerClient) -> None:
    """Even though all that this read asks for lies there already."""
    with pool_of(plan_of(CountingSource(20), steps=50, workers=2, prefetch=4), fork_server) as pool:
        pool.read(0)
        victim = processes_of(fork_server)[1]
        os.kill(victim, signal.SIGKILL)
        until(lambda: victim not in processes_of(fork_server))
        with pytest.raises(CloseranksError, match="process 2 of 2 that read counting was killed by SIGKILL") as caught:
            pool.read(1)
    assert caught.value.exit_code == 1


def test_signals_to_the_job_do_not_end_a_process(fork_server: ForkServerClient) -> None:
    with pool_of(plan_of(CountingSource(20), steps=20, workers=2), fork_server) as pool:
        pool.read(0)
        for pid in (fork_server.pid, *processes_of(fork_server)):
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                os.kill(pid, number)
        for step in range(1, 20):
            assert len(pool.read(step)) == 4


def test_close_ends_a_process_that_is_stuck_in_a_read(fork_server: ForkServerClient, tmp_path: Path) -> None:
    path = tmp_path / "here"
    with pool_of(
        plan_of(StuckSource(20, sample_at(plan_of(CountingSource(20)), 0, 1), str(path)), workers=2), fork_server
    ):
        until(path.exists)
        began = time.monotonic()
    assert time.monotonic() - began < 30.0
    assert processes_of(fork_server) == []


def test_stop_wakes_whoever_waits(fork_server: ForkServerClient, tmp_path: Path) -> None:
    path, woken = tmp_path / "here", threading.Event()
    plan = plan_of(StuckSource(20, sample_at(plan_of(CountingSource(20)), 0, 1), str(path)), workers=2)

    def wait_in_vain(pool: LoaderWorkerPool) -> None:
        with pytest.raises(LoaderStopped):
            pool.read(0)
        woken.set()

    with pool_of(plan, fork_server) as pool:
        thread = threading.Thread(target=wait_in_vain, args=(pool,))
        thread.start()
        until(path.exists)
        pool.stop()
        thread.join(10)
    assert woken.is_set()


def test_closing_at_once_leaves_nothing(fork_server: ForkServerClient) -> None:
    for _ in range(3):
        with pool_of(plan_of(CountingSource(20), steps=1000, workers=2), fork_server):
            pass
    assert processes_of(fork_server) == []


def test_a_dataset_that_cannot_be_sent_is_refused_before_anything_starts(fork_server: ForkServerClient) -> None:
    with pytest.raises(UserError, match="cannot be sent to loader processes"):
        LoaderWorkerPool(plan_of(LocalSource(20), workers=2), 0, fork_server)
    assert processes_of(fork_server) == []


def test_a_dataset_that_does_not_arrive_is_an_error_of_the_first_read(
    fork_server: ForkServerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Elsewhere(CountingSource):
        pass

    Elsewhere.__qualname__ = "Elsewhere"
    monkeypatch.setattr(sys.modules[__name__], "Elsewhere", Elsewhere, raising=False)
    with pool_of(plan_of(Elsewhere(20), workers=2), fork_server) as pool, pytest.raises(UserError) as caught:
        pool.read(0)
    assert "fails to unpickle in loader processes: AttributeError: Can't get attribute 'Elsewhere'" in str(caught.value)


# Beyond one fork server


_SCRIPT = """
import os, sys, threading
from pathlib import Path
from closeranks.data.loading.loader import Loader
from closeranks.data.sampling.order import FullOrder, BatchSchedule
from closeranks.data.loading.read_settings import ReadSettings
from tests.data.doubles import CountingSource

class Own(CountingSource):
    identity = "a dataset of the script's own"

def begin(found):
    loader = Loader(Own(20), FullOrder(20, 5), BatchSchedule.for_steps(20, 8, 2, 99), settings=ReadSettings(workers=2))
    loader.start(0)
    assert len(loader.take(0)) == 4
    found.append(loader)

if __name__ == "__main__":
    found = []
    begin(found)
    thread = threading.Thread(target=begin, args=(found,))
    thread.start()
    thread.join()
    fork_servers = [loader._fork_server.pid for loader in found]
    children = [pid for one in fork_servers for pid in Path(f"/proc/{one}/task/{one}/children").read_text().split()]
    print(*fork_servers, *children, flush=True)
    sys.stdin.read()
"""


def test_processes_die_with_their_rank_whichever_thread_started_them(tmp_path: Path) -> None:
    """The dataset is a class of the script itself, too."""
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT)
    root = Path(__file__).parents[3]
    rank = subprocess.Popen(
        [sys.executable, str(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(root)},
        text=True,
    )
    with rank:
        assert rank.stdout is not None
        pids = [int(word) for word in rank.stdout.readline().split()]
        assert len(pids) == 6
        assert all(Path(f"/proc/{pid}").exists() for pid in pids)
        rank.kill()
    until(lambda: not any(_is_running(pid) for pid in pids), 10.0)


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_the_death_of_the_nursery_is_told() -> None:
    one = ForkServerClient()
    with pool_of(plan_of(CountingSource(20), workers=1), one) as pool:
        os.kill(one.pid, signal.SIGKILL)
        match = "parent of the processes that read counting was killed by SIGKILL"
        with pytest.raises(CloseranksError, match=match) as caught:
            pool.read(0)
    assert caught.value.exit_code == 1
    one.close()
