from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from closeranks.checkpoint.save.save_task import SaveReport
from closeranks.checkpoint.save.writer_client import WriterClient
from closeranks.storage.lease import Lease, LeaseTimes, decode, own_lease, release_all
from closeranks.storage.object_store.remote import RemoteStorage
from closeranks.storage.protocol import DeniedError, StorageError
from tests.checkpoint import saving
from tests.storage import servers

TERMS = LeaseTimes(renew_s=0.05, lease_s=2.0, poll_s=0.01)
UNHURRIED = LeaseTimes(renew_s=1.0, lease_s=4.0, poll_s=0.01)
"""For who watches whether a lease is renewed: a busy machine may renew it half a second late."""


@pytest.fixture
def opener(prefix: str) -> Callable[[], RemoteStorage]:
    return lambda: RemoteStorage(f"memory://{prefix}", times=TERMS)


def test_a_lease_comes_back_as_it_was_written() -> None:
    assert decode(Lease("me", 12.5).encode()) == Lease("me", 12.5)
    own = own_lease("me")
    assert decode(own.encode()) == own
    assert own_lease("me").pid == os.getpid()


@pytest.mark.parametrize("data", [b"", b"\xff", b"[]", b"{}", b'{"owner": 1, "expires_at": "soon"}'])
def test_a_damaged_lease_has_passed(data: bytes) -> None:
    assert decode(data).expires_at == 0.0


@pytest.mark.parametrize("data", [Lease("a dead one", 1.0).encode(), b"rubbish"])
def test_a_lease_left_behind_is_taken_over(
    opener: Callable[[], RemoteStorage], data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    storage = opener()
    storage.publish(".lock/dead.json", data)
    with caplog.at_level(logging.WARNING), storage.lock("me"):
        assert len(storage.names(".lock")) == 1
    assert "left behind" in caplog.text
    assert storage.names(".lock") == []


def test_a_clock_that_runs_ahead_takes_nothing_from_a_living_holder(
    prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lease has long passed by our clock, but it is renewed while we watch."""
    storage, other = (RemoteStorage(f"memory://{prefix}", times=UNHURRIED) for _ in range(2))
    with storage.lock("the holder"):
        now = time.time
        monkeypatch.setattr(time, "time", lambda: now() + (1000 if threading.current_thread().name != "lease" else 0))
        with pytest.raises(DeniedError, match="the holder"), other.lock("one from the future"):
            pytest.fail("two hold it")


def ended_process() -> int:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    return process.pid


@pytest.mark.parametrize("change", [{"pid": ended_process}, {"began": lambda: 1}])
def test_a_lease_of_a_process_of_this_host_that_is_gone_is_dead_at_once(
    prefix: str, change: dict[str, Callable[[], int]]
) -> None:
    """Long before its time has passed; a number that another process has by now deceives nobody."""
    storage = RemoteStorage(f"memory://{prefix}")
    changed = {name: value() for name, value in change.items()}
    left = replace(own_lease("a writer"), expires_at=time.time() + 60, **changed)
    storage.publish(".lock/left.json", left.encode())
    started_at = time.monotonic()
    with storage.lock("me"):
        assert len(storage.names(".lock")) == 1
    assert time.monotonic() - started_at < 30.0


@pytest.mark.parametrize("change", [{}, {"host": "another"}, {"host": "", "pid": 1 << 22}, {"pid": 1, "host": "x"}])
def test_a_process_that_lives_or_cannot_be_asked_about_keeps_its_lease(
    opener: Callable[[], RemoteStorage], change: dict[str, Any]
) -> None:
    storage = opener()
    storage.publish(".lock/other.json", replace(own_lease("a writer"), expires_at=time.time() + 60, **change).encode())
    with pytest.raises(DeniedError, match="a writer, process"), storage.lock("me"):
        pytest.fail("two hold it")


def test_a_process_that_ends_gives_back_what_its_threads_hold(opener: Callable[[], RemoteStorage]) -> None:
    storage, inside, leave = opener(), threading.Event(), threading.Event()

    def hold() -> None:
        with suppress(StorageError), storage.lock("a thread that does not listen"):
            inside.set()
            leave.wait(30.0)

    thread = threading.Thread(target=hold)
    thread.start()
    assert inside.wait(60.0)
    release_all(0.1)
    assert storage.names(".lock") == []
    leave.set()
    thread.join()


@pytest.mark.world
@pytest.mark.parametrize("is_stuck", [False, True])
def test_a_writer_that_is_given_up_leaves_no_lease_to_wait_for(
    moto: servers.Server, prefix: str, is_stuck: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is hung up on gives it back; one that cannot any more is known to be gone."""
    monkeypatch.setenv("FSSPEC_S3", json.dumps(servers.options(moto.endpoint)))
    place = f"s3://{prefix}"
    storage = RemoteStorage(place, servers.options(moto.endpoint))
    one = WriterClient(saving.settings(place, timeout_s=60.0))
    made, buffer = saving.order(1, 0, 2)  # rank 1 never comes
    with saving.memfd(buffer) as fd:
        one.send(made, fd)
        reports: list[SaveReport] = []
        while "written" not in saving.kinds(reports):
            reports += one.wait(0.05)
            assert one.is_busy, reports
        assert len(storage.names(".lock")) == 1
        assert one._process is not None
        if is_stuck:
            os.kill(one._process.pid, signal.SIGSTOP)
        one.close()
    assert len(storage.names(".lock")) == is_stuck
    started_at = time.monotonic()
    with storage.lock("the last save", wait_s=120.0):
        seconds = time.monotonic() - started_at
    print(f"the lock was taken in {seconds * 1000:.0f} ms")
    assert seconds < 30.0  # some ms where nothing else runs; a lease lasts a minute


def test_it_is_held_longer_than_a_lease(opener: Callable[[], RemoteStorage]) -> None:
    storage = opener()
    seen: set[bytes] = set()
    with storage.lock("me"):
        (name,) = storage.names(".lock")
        first = decode(storage.read(f".lock/{name}")).expires_at
        while (lease := decode(storage.read(f".lock/{name}"))).expires_at < first + TERMS.lease_s:
            seen.add(lease.encode())
            threading.Event().wait(0.005)
    assert len(seen) > 3


def test_a_holder_learns_that_it_lost_it(opener: Callable[[], RemoteStorage]) -> None:
    storage = opener()

    def lose() -> None:
        with storage.lock("me"):
            (name,) = storage.names(".lock")
            storage.remove(f".lock/{name}")
            while any(thread.name == "lease" for thread in threading.enumerate()):
                threading.Event().wait(0.005)

    with pytest.raises(StorageError, match="was lost while it was held"):
        lose()


def test_of_many_never_two_hold_it(opener: Callable[[], RemoteStorage]) -> None:
    num_turns, num_inside, most = [0], [0], [0]
    guard = threading.Lock()

    def take_turns(turn: int) -> None:
        storage = opener()
        for _ in range(3):
            with storage.lock(f"thread {turn}", wait_s=60):
                with guard:
                    num_inside[0] += 1
                    most[0] = max(most[0], num_inside[0])
                threading.Event().wait(0.002)
                with guard:
                    num_inside[0] -= 1
                    num_turns[0] += 1

    threads = [threading.Thread(target=take_turns, args=(turn,)) for turn in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (num_turns[0], most[0]) == (12, 1)


def test_terms_leave_room_for_failed_renewals() -> None:
    assert LeaseTimes().lease_s >= 3 * LeaseTimes().renew_s
    assert LeaseTimes().watch_s > LeaseTimes().renew_s
