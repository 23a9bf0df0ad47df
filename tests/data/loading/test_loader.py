from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from closeranks.core.errors import DataError
from closeranks.core.protocols import Batch
from closeranks.data.loading.loader import Loader
from closeranks.data.loading.quarantine import BadSample, Quarantine
from closeranks.data.loading.read_settings import ReadSettings
from closeranks.data.sampling.order import BatchSchedule, FullOrder, Ints
from closeranks.data.timing import StageTimes
from closeranks.testing import run_world
from tests.data.doubles import CountingSource, FailingSource, SlowSource, StoredSource, StuckSource

PLACES = {"data_rank", "data_size", "device", "even", "quarantine"}


def loader_of(source: CountingSource, *, steps: int = 5, batch: int = 8, **options: Any) -> Loader:
    size = len(source)
    settings = ReadSettings(**{name: value for name, value in options.items() if name not in PLACES})
    places = {name: value for name, value in options.items() if name in PLACES}
    schedule = BatchSchedule.for_steps(size, batch, 2, steps)
    return Loader(source, FullOrder(size, 5), schedule, settings=settings, **places)


@contextlib.contextmanager
def loading(source: CountingSource, *, start: int = 0, **options: Any) -> Iterator[Loader]:
    loader = loader_of(source, **options)
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


def test_processes_change_nothing_and_serve_one_start_after_another() -> None:
    with loading(CountingSource(20)) as threaded:
        expected = [ids(threaded.take(step)) for step in range(5)]
    source = CountingSource(20)
    with loading(source, workers=3) as loader:
        assert [ids(loader.take(step)) for step in range(5)] == expected
        parents = {child.pid for child in psutil.Process().children()}
        for step in (3, 1):
            loader.start(step)
            assert [ids(loader.take(later)) for later in range(step, 5)] == expected[step:]
            assert {child.pid for child in psutil.Process().children()} == parents, "torch is not imported again"
        assert own_threads() == []
    assert source.read_indices == []
    with pytest.raises(ValueError, match="not started"):
        loader.take(0)


def test_closing_while_the_processes_are_not_even_there_does_not_take_long() -> None:
    loader = loader_of(CountingSource(20), workers=2)
    loader.start(0)
    began = time.monotonic()
    loader.close()
    assert time.monotonic() - began < 20.0


def read_in_processes() -> list[list[int]]:
    """A rank is a daemonic child of a server that forks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    with loading(CountingSource(20), workers=1, data_rank=rank, data_size=size) as loader:
        return [ids(loader.take(step)) for step in range(5)]


@pytest.mark.world
def test_ranks_have_processes_of_their_own() -> None:
    with loading(CountingSource(20)) as alone:
        expected = [ids(alone.take(step)) for step in range(5)]
    first, second = run_world(read_in_processes, 2)
    assert [one + other for one, other in zip(first, second, strict=True)] == expected


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


def test_ranks_that_must_keep_up_with_the_others_get_a_spare() -> None:
    """Three micro-batches a step and two ranks: the second works one off that counts nothing."""
    ranks = [loader_of(CountingSource(20), batch=6, data_rank=rank, data_size=2, even=True) for rank in (0, 1)]
    for loader in ranks:
        loader.start(0)
    for step in range(5):
        first, second = (loader.take(step) for loader in ranks)
        assert len(first) == len(second) == 2
        assert [one.micro_batch.is_padding for one in (*first, *second)] == [False, False, False, True]
        assert ids(second[1:]) == ids(second[:1])
    for loader in ranks:
        loader.close()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_steps_are_taken_in_order_and_within_the_schedule(prefetch: int) -> None:
    loader = loader_of(CountingSource(20), steps=2, prefetch=prefetch)
    with pytest.raises(ValueError, match="not started"):
        loader.take(0)
    loader.start(0)
    with pytest.raises(ValueError, match="is before step 0"):
        loader.take(1)
    assert loader.take(0)
    with pytest.raises(ValueError, match="is before step 1"):
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


def bad_sample(step: int, micro_batch: int) -> int:
    return int(BatchSchedule.for_steps(20, 8, 2, 5).micro_batches(step)[micro_batch].indices(20, 5)[0])


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_an_error_is_raised_when_its_step_is_taken_and_ever_after(prefetch: int) -> None:
    bad = bad_sample(1, 2)
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
    with loading(FailingSource(20, bad_sample(1, 0), OSError("torn"))) as loader:
        first = ids(loader.take(0))
        with pytest.raises(DataError):
            loader.take(1)
        loader.start(0)
        assert ids(loader.take(0)) == first


def test_a_source_is_closed_with_its_loader() -> None:
    source = StoredSource(20)
    with loading(source) as loader:
        loader.take(0)
        assert source.num_closed == 0
    assert source.num_closed == 1


# Waiting, and for what


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


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("name", ["read", "fetch", "decode", "collate"])
def test_a_slow_stage_shows_under_its_name_and_as_waiting(name: str, prefetch: int) -> None:
    with loading(SlowSource(20, name, 0.01), steps=3, prefetch=prefetch) as loader:
        for step in range(3):
            loader.take(step)
            spent = {
                stage: getattr(loader.last_times, f"{stage}_s") for stage in ("read", "fetch", "decode", "collate")
            }
            assert spent[name] >= 0.04  # four micro-batches a step
            assert max(spent, key=lambda stage: spent[stage]) == name
        assert loader.wait_s >= 0.09


def test_a_fast_loader_is_not_waited_for() -> None:
    read = threading.Semaphore(0)

    class Telling(CountingSource):
        def read(self, indices: Ints) -> Batch:
            batch = super().read(indices)
            read.release()
            return batch

    with loading(Telling(20), steps=40, prefetch=2) as loader:
        waited = []
        for step in range(40):
            for _ in range(4):
                assert read.acquire(timeout=30)
            before = loader.wait_s
            until_ready(loader)
            loader.take(step)
            waited.append(loader.wait_s - before)
    assert sorted(waited)[20] < 0.001


def until_ready(loader: Loader) -> None:
    assert loader._prefetch_thread is not None
    deadline = time.monotonic() + 30
    while loader._prefetch_thread._ready.empty():
        assert time.monotonic() < deadline
        time.sleep(0)


def test_a_step_without_work_took_no_time() -> None:
    with loading(CountingSource(20), data_rank=6, data_size=7) as loader:
        loader.take(0)
        assert loader.last_times == StageTimes()


# Bad data


def test_samples_in_quarantine_are_not_read_and_what_is_found_is_not_added_by_itself() -> None:
    quarantine = Quarantine(10, [BadSample(4, "there", "torn")])
    source = StoredSource(20, damaged=(4, 9))
    with loading(source, on_bad="skip", quarantine=quarantine, steps=2) as loader:
        skipped = [bad.sample for step in (0, 1) for one in loader.take(step) for bad in one.skipped]
    assert 4 not in [index for read in source.read_indices for index in read]
    assert set(skipped) <= {4, 9}
    assert len(quarantine) == 1


def test_a_resumed_run_leaves_out_the_same_samples() -> None:
    def run(start: int, quarantine: Quarantine) -> list[list[int]]:
        with loading(StoredSource(20, damaged=(4, 9)), start=start, on_bad="skip", quarantine=quarantine) as loader:
            seen = []
            for step in range(start, 5):
                loaded = loader.take(step)
                quarantine.add(bad for one in loaded for bad in one.skipped)
                seen.append(ids(loaded))
                states.append(quarantine.state())
            return seen

    states: list[Any] = []
    whole = run(0, Quarantine(10))
    for start in range(1, 5):
        resumed = Quarantine(10)
        resumed.load(states[start - 1])
        assert run(start, resumed) == whole[start:]
        assert resumed.state() == states[4]


def test_a_schedule_for_other_data_is_refused() -> None:
    with pytest.raises(DataError, match="has changed while the run was opened: 10 samples first, then 20"):
        Loader(CountingSource(20), FullOrder(20, 5), BatchSchedule.for_steps(10, 8, 2, 1))


# On a device


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{"prefetch": 0}, {"prefetch": 2}, {"workers": 2}])
def test_batches_arrive_on_the_gpu(options: dict[str, int]) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    bare = torch.device("cuda")
    with loading(CountingSource(20)) as plain, loading(CountingSource(20), device=bare, **options) as loader:
        for step in range(5):
            loaded = loader.take(step)
            assert all(one.batch["x"].device == device for one in loaded)
            assert ids(loaded) == ids(plain.take(step))


@pytest.mark.gpu
def test_what_a_stream_computes_with_is_complete_and_is_not_overwritten() -> None:
    """Large batches behind a long computation: a copy that nobody waited for, or memory that was used again too early,
    would show in the sums."""

    class Large(CountingSource):
        def read(self, indices: Ints) -> Batch:
            batch = super().read(indices)
            return {**batch, "wide": batch["id"].view(-1, 1).expand(-1, 1 << 20).contiguous()}

    busy = torch.randn(4096, 4096, device="cuda")
    with loading(Large(20), steps=20, device=torch.device("cuda"), prefetch=2) as loader:
        sums, expected = [], []
        for step in range(20):
            loaded = loader.take(step)
            for _ in range(5):
                busy = (busy @ busy).clamp(-1, 1)
            sums += [one.batch["wide"].sum(dim=1) for one in loaded]
            expected += [one.batch["id"] * (1 << 20) for one in loaded]
            del loaded
        for one, other in zip(sums, expected, strict=True):
            assert torch.equal(one, other)


@pytest.mark.gpu
def test_taking_a_step_does_not_wait_for_the_gpu() -> None:
    with loading(CountingSource(20), device=torch.device("cuda"), prefetch=2) as loader:
        loader.take(0)
        torch.cuda.synchronize()
        until_ready(loader)
        torch.cuda.set_sync_debug_mode("error")
        try:
            loader.take(1)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_closing_while_processes_are_read_for_the_gpu(tmp_path: Any) -> None:
    source = StuckSource(20, bad_sample(0, 1), str(tmp_path / "here"))
    loader = loader_of(source, workers=2, device=torch.device("cuda"))
    loader.start(0)
    deadline = time.monotonic() + 60
    while not (tmp_path / "here").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    began = time.monotonic()
    loader.close()
    assert time.monotonic() - began < 5.0
    assert own_threads() == []
