"""A sink on its own thread: what it does wrong costs nothing but its own events."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest

from closeranks.core.events import Event, StepDone, Warned
from closeranks.telemetry.sinks import sink_thread
from closeranks.telemetry.sinks.sink import MissingPackageError
from closeranks.telemetry.sinks.sink_thread import SinkThread, close_all


class Told:
    """Collects warnings, and lets a test wait for one."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._changed = threading.Condition()

    def __call__(self, event: Event) -> None:
        assert isinstance(event, Warned)
        with self._changed:
            self.texts.append(event.what)
            self._changed.notify_all()

    def wait_for(self, number: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.texts) >= number, 60)


class Scripted:
    """Fails in ``open`` and ``handle`` as often as it is told to."""

    name, fix = "telemetry.scripted", "Mend it."

    def __init__(self, bad_opens: Sequence[Exception] = (), bad_handles: Sequence[Exception] = ()) -> None:
        self._bad_opens, self._bad_handles = list(bad_opens), list(bad_handles)
        self.steps: list[int] = []
        self.num_opened = self.num_closed = 0
        self.may_go = threading.Event()
        self.may_go.set()
        self.is_in_handle = threading.Event()
        self.threads: set[str] = set()

    def open(self) -> None:
        self.threads.add(threading.current_thread().name)
        if self._bad_opens:
            raise self._bad_opens.pop(0)
        self.num_opened += 1

    def handle(self, events: Sequence[Event]) -> None:
        self.threads.add(threading.current_thread().name)
        self.is_in_handle.set()
        self.may_go.wait(60)
        if self._bad_handles:
            raise self._bad_handles.pop(0)
        self.steps += [one.step for one in events if isinstance(one, StepDone)]

    def close(self) -> None:
        self.num_closed += 1


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink_thread, "_FIRST_RETRY_S", 0.01)
    monkeypatch.setattr(sink_thread, "_PERIOD_S", 0.01)


def steps(thread: SinkThread, numbers: range) -> None:
    for number in numbers:
        thread.handle(StepDone(step=number))


def test_everything_arrives_in_order_on_another_thread() -> None:
    sink, told = Scripted(), Told()
    thread = SinkThread(sink, told)
    steps(thread, range(5000))
    thread.close()
    assert sink.steps == list(range(5000))
    assert (sink.num_opened, sink.num_closed) == (1, 1)
    assert sink.threads == {"sink telemetry.scripted"}
    assert told.texts == []


@pytest.mark.parametrize("place", ["bad_opens", "bad_handles"])
def test_an_outage_is_told_once_and_nothing_is_lost(place: str) -> None:
    sink, told = Scripted(**{place: [ConnectionError("gone")] * 3}), Told()
    thread = SinkThread(sink, told)
    steps(thread, range(100))
    told.wait_for(2)
    steps(thread, range(100, 200))
    thread.close()
    assert sink.steps == list(range(200))
    failure, recovery = told.texts
    assert failure.startswith(
        "telemetry.scripted fails; training continues, and it is tried again. ConnectionError: gone"
    )
    assert failure.endswith("Mend it.")
    assert recovery == "telemetry.scripted works again; nothing was lost"


def test_a_sink_that_never_works_says_how_much_it_lost() -> None:
    sink, told = Scripted(bad_opens=[OSError(28, "No space left on device")] * 10_000), Told()
    thread = SinkThread(sink, told)
    steps(thread, range(50))
    told.wait_for(1)
    thread.close()
    assert len(told.texts) == 2
    assert "No space left on device" in told.texts[0]
    assert told.texts[1] == "telemetry.scripted: 50 events were lost"
    assert sink.num_closed == 0


def test_a_missing_package_is_not_looked_for_again() -> None:
    sink, told = Scripted(bad_opens=[MissingPackageError("telemetry.scripted", "scripted")]), Told()
    thread = SinkThread(sink, told)
    told.wait_for(1)
    steps(thread, range(50))
    thread.close()
    assert sink.num_opened == 0
    (text,) = told.texts
    assert text.startswith("telemetry.scripted is disabled for the rest of the run: telemetry.scripted needs the")
    assert "pip install closeranks[track]" in text


def test_a_sink_that_blocks_holds_up_nobody_and_its_drops_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink_thread, "MOST_EVENTS", 10)
    sink, told = Scripted(), Told()
    sink.may_go.clear()
    thread = SinkThread(sink, told)
    thread.handle(StepDone(step=0))
    assert sink.is_in_handle.wait(60)
    steps(thread, range(1, 31))  # returns, although the sink stands still
    sink.may_go.set()
    told.wait_for(1)
    thread.close()
    assert sink.steps == list(range(11))
    assert told.texts == ["telemetry.scripted is slower than the run: 20 events were lost so far"]


def test_closing_gives_up_on_sinks_that_hang() -> None:
    hanging, told = [Scripted(), Scripted()], Told()
    for sink in hanging:
        sink.may_go.clear()
    threads = [SinkThread(sink, told) for sink in hanging]
    for sink, thread in zip(hanging, threads, strict=True):
        thread.handle(StepDone(step=1))
        assert sink.is_in_handle.wait(60)
    before = time.monotonic()
    close_all(threads, 0.2)
    assert time.monotonic() - before < 30, "and not for as long as they hang"
    assert len(told.texts) == 2
    assert all("did not finish in time: the last 1 events may be missing" in text for text in told.texts), told.texts
    for sink in hanging:
        sink.may_go.set()


def test_one_that_is_not_retried_is_not_called_again() -> None:
    sink, told = Scripted(bad_handles=[ValueError("bad")]), Told()
    thread = SinkThread(sink, told, is_retried=False)
    steps(thread, range(3))
    told.wait_for(1)
    steps(thread, range(3))
    thread.close()
    assert sink.steps == []
    assert sink.num_closed == 0
    (text,) = told.texts
    assert text.startswith("telemetry.scripted is disabled for the rest of the run: ValueError: bad")


def test_events_after_the_end_are_ignored() -> None:
    sink = Scripted()
    thread = SinkThread(sink, Told())
    thread.close()
    steps(thread, range(3))
    assert sink.steps == []
