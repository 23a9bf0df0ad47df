from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from closeranks.core.errors import DataError
from closeranks.core.protocols import Batch
from closeranks.data.loader import Loader
from closeranks.data.order import Ints, Schedule

from .doubles import CountingSource, FailingSource


@contextlib.contextmanager
def loading(source: CountingSource, *, steps: int = 5, start: int = 0, **options: Any) -> Iterator[Loader]:
    loader = Loader(source, Schedule.for_steps(len(source), 8, 2, steps), 5, **options)
    loader.start(start)
    try:
        yield loader
    finally:
        loader.close()


def own_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "closeranks-loader"]


def ids(loaded: list[Any]) -> list[int]:
    return [int(i) for one in loaded for i in one.batch["id"]]


def test_reading_ahead_changes_nothing_but_the_thread() -> None:
    seen = []
    for prefetch in (0, 1, 2, 7):
        source = CountingSource(20)
        with loading(source, prefetch=prefetch) as loader:
            seen.append([ids(loader.take(step)) for step in range(5)])
        assert source.threads == {"closeranks-loader" if prefetch else "MainThread"}
    assert seen[0] == seen[1] == seen[2] == seen[3]
    assert [len(step) for step in seen[0]] == [8] * 5


@pytest.mark.parametrize("prefetch", [0, 2])
def test_starting_later_gives_the_same_steps(prefetch: int) -> None:
    with loading(CountingSource(20), prefetch=prefetch) as whole, loading(CountingSource(20), start=3) as late:
        first = [ids(whole.take(step)) for step in range(5)]
        assert [ids(late.take(step)) for step in (3, 4)] == first[3:]
        whole.start(1)
        assert ids(whole.take(1)) == first[1]


def test_a_rank_without_work_gets_an_empty_list() -> None:
    with loading(CountingSource(20), data_rank=6, data_size=7) as loader:
        assert [loader.take(step) for step in range(5)] == [[]] * 5


@pytest.mark.parametrize("prefetch", [0, 2])
def test_steps_are_taken_in_order_and_within_the_schedule(prefetch: int) -> None:
    loader = Loader(CountingSource(20), Schedule.for_steps(20, 8, 2, 2), 5, prefetch=prefetch)
    with pytest.raises(ValueError, match="not started"):
        loader.take(0)
    loader.start(0)
    with pytest.raises(ValueError, match="stands before step 0"):
        loader.take(1)
    assert loader.take(0)
    with pytest.raises(ValueError, match="stands before step 1"):
        loader.take(0)
    assert loader.take(1)
    with pytest.raises(ValueError, match="before step 2 of 2"):
        loader.take(2)
    loader.close()


def test_on_the_cpu_nothing_is_copied() -> None:
    handed: list[Batch] = []

    class Remembering(CountingSource):
        def read(self, indices: Ints) -> Batch:
            handed.append(super().read(indices))
            return handed[-1]

    with loading(Remembering(20), prefetch=1) as loader:
        loaded = loader.take(0)
    assert [one.batch["x"].data_ptr() for one in loaded] == [batch["x"].data_ptr() for batch in handed[:4]]


def test_never_reads_further_ahead_than_asked() -> None:
    """One step waits in the queue for each of ``prefetch``, and one more is in the reader's hand."""

    class Gauge(CountingSource):
        def read(self, indices: Ints) -> Batch:
            assert len(self.read_indices) // 4 <= taken + 1 + 2
            return super().read(indices)

    taken = 0
    with loading(Gauge(20), steps=30, prefetch=2) as loader:
        for step in range(30):
            assert len(loader.take(step)) == 4
            taken = step + 1


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_an_error_is_raised_when_its_step_is_taken_and_ever_after(prefetch: int) -> None:
    schedule = Schedule.for_steps(20, 8, 2, 5)
    bad = int(schedule.micro_batches(1)[2].indices(20, 5)[0])
    with loading(FailingSource(20, bad, OSError("torn")), prefetch=prefetch) as loader:
        assert len(loader.take(0)) == 4
        for _ in range(2):
            with pytest.raises(DataError, match=rf"{bad}.* of failing raised OSError: torn \(.*doubles.py:\d+\)"):
                loader.take(1)
    assert own_threads() == []


def test_a_data_error_arrives_as_it_is() -> None:
    error = DataError("row 7 is torn", "Mend it.")
    with loading(FailingSource(8, 3, error)) as loader, pytest.raises(DataError) as caught:
        loader.take(0)
    assert caught.value is error


def test_even_an_exit_in_the_thread_reaches_the_loop() -> None:
    with loading(FailingSource(8, 3, SystemExit(4))) as loader, pytest.raises(DataError, match="SystemExit: 4"):
        loader.take(0)


def test_an_interrupt_in_the_foreground_stays_an_interrupt() -> None:
    with loading(FailingSource(8, 3, KeyboardInterrupt()), prefetch=0) as loader, pytest.raises(KeyboardInterrupt):
        loader.take(0)


def test_close_joins_a_thread_that_waits_for_room() -> None:
    """Step 0 is taken, step 1 fills the queue, and step 2 is read: its last micro-batch is the twelfth."""
    full = threading.Event()

    class Signalling(CountingSource):
        def read(self, indices: Ints) -> Batch:
            batch = super().read(indices)
            if len(self.read_indices) == 12:
                full.set()
            return batch

    source = Signalling(20)
    with loading(source, steps=1000, prefetch=1) as loader:
        loader.take(0)
        assert full.wait(30)
        (thread,) = own_threads()
        assert thread.daemon
    assert not thread.is_alive()
    assert len(source.read_indices) == 12
    loader.close()
    with pytest.raises(ValueError, match="not started"):
        loader.take(1)


def test_restarting_leaves_one_thread() -> None:
    with loading(CountingSource(20), steps=1000) as loader:
        for step in (5, 9, 2):
            loader.start(step)
            assert len(own_threads()) == 1
            loader.take(step)


def test_restarting_clears_an_old_failure() -> None:
    schedule = Schedule.for_steps(20, 8, 2, 5)
    bad = int(schedule.micro_batches(1)[0].indices(20, 5)[0])
    with loading(FailingSource(20, bad, OSError("torn"))) as loader:
        first = ids(loader.take(0))
        with pytest.raises(DataError):
            loader.take(1)
        loader.start(0)
        assert ids(loader.take(0)) == first


def test_waiting_is_counted() -> None:
    released = threading.Event()

    class Held(CountingSource):
        def read(self, indices: Ints) -> Batch:
            assert released.wait(30)
            return super().read(indices)

    with loading(Held(20), prefetch=1) as loader:
        assert loader.wait_s == 0.0
        timer = threading.Timer(0.05, released.set)
        timer.start()
        loader.take(0)
        timer.join()
        assert loader.wait_s >= 0.04
        waited = loader.wait_s
        loader.take(1)
        assert loader.wait_s >= waited


def test_a_schedule_for_other_data_is_refused() -> None:
    with pytest.raises(ValueError, match="10 samples over a source of 20"):
        Loader(CountingSource(20), Schedule.for_steps(10, 8, 2, 1), 5)


@pytest.mark.gpu
@pytest.mark.parametrize("prefetch", [0, 2])
def test_batches_arrive_on_the_gpu(prefetch: int) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    bare = torch.device("cuda")
    with loading(CountingSource(20)) as plain, loading(CountingSource(20), device=bare, prefetch=prefetch) as loader:
        for step in range(5):
            loaded = loader.take(step)
            assert all(one.batch["x"].device == device for one in loaded)
            assert ids(loaded) == ids(plain.take(step))
