"""The sampler emits what was used, on its own thread; a fork is safe in it, a failure is told once, and it is cheap."""

from __future__ import annotations

import os
import threading
import timeit

import pytest

from closeranks.core.events import Event, Resources, Warned
from closeranks.telemetry.resources import sampler as sampler_module
from closeranks.telemetry.resources.cgroup_usage import read_cgroup
from closeranks.telemetry.resources.host_usage import read_host
from closeranks.telemetry.resources.process_usage import read_process
from closeranks.telemetry.resources.sampler import ResourceSampler


class Emitted:
    """Events as they come, and a way to wait for them."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.threads: set[str] = set()
        self._arrived = threading.Condition()

    def __call__(self, event: Event) -> None:
        with self._arrived:
            self.events.append(event)
            self.threads.add(threading.current_thread().name)
            self._arrived.notify_all()

    def wait_for(self, num: int) -> None:
        with self._arrived:
            assert self._arrived.wait_for(lambda: len(self.events) >= num, 60)


def test_every_interval_is_an_event_of_another_thread() -> None:
    emitted = Emitted()
    sampler = ResourceSampler(0.02, 3, reads_host=True)
    sampler.start(emitted)
    emitted.wait_for(3)
    sampler.close()
    assert emitted.threads == {"resource sampler"}
    for event in emitted.events:
        assert isinstance(event, Resources)
        assert event.host_number == 3
        assert event.seconds > 0
        assert event.process["rss_bytes"] > 0
        assert "cpus" in event.host_wide
        assert event.gpu == {}
    assert "resource sampler" not in {thread.name for thread in threading.enumerate()}


def test_only_the_first_rank_of_a_host_reads_the_host() -> None:
    emitted = Emitted()
    sampler = ResourceSampler(0.02, 0, reads_host=False)
    sampler.start(emitted)
    emitted.wait_for(1)
    sampler.close()
    (event, *_) = emitted.events
    assert isinstance(event, Resources)
    assert event.host_wide == {}


def test_a_run_that_is_over_at_once_records_nothing() -> None:
    emitted = Emitted()
    sampler = ResourceSampler(60.0, 0, reads_host=True)
    sampler.start(emitted)
    sampler.close()
    assert emitted.events == []


def test_a_failure_is_told_once_and_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    emitted, num_looks = Emitted(), [0]
    sampler = ResourceSampler(0.01, 0, reads_host=False)
    looked_often = threading.Event()

    def fail() -> None:
        num_looks[0] += 1
        if num_looks[0] > 3:
            looked_often.set()
        raise OSError("no such counter")

    monkeypatch.setattr(sampler_module, "read_process", fail)
    sampler.start(emitted)
    assert looked_often.wait(60)
    sampler.close()
    (event,) = emitted.events
    assert isinstance(event, Warned)
    assert "no such counter" in event.what


def test_a_fork_waits_for_the_look_in_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """The child would otherwise find a lock of a library held by a thread that it does not have."""
    is_looking, may_end, library = threading.Event(), threading.Event(), threading.Lock()

    def slow() -> None:
        with library:
            is_looking.set()
            assert may_end.wait(60)
        raise OSError("over")

    sampler = ResourceSampler(0.01, 0, reads_host=False)
    monkeypatch.setattr(sampler_module, "read_process", slow)
    sampler.start(Emitted())
    assert is_looking.wait(60)
    threading.Timer(0.2, may_end.set).start()
    pid = os.fork()
    if pid == 0:
        os._exit(0 if library.acquire(blocking=False) else 1)
    _, status = os.waitpid(pid, 0)
    monkeypatch.undo()
    sampler.close()
    assert os.waitstatus_to_exitcode(status) == 0


def test_a_look_is_cheap() -> None:
    """Less than 2 ms of processor time; a busy machine must not fail this, so ten times that."""

    def look() -> None:
        read_process()
        read_cgroup()
        read_host()

    assert min(timeit.repeat(look, number=5, repeat=10)) / 5 < 20e-3
