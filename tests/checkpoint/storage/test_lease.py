from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import pytest

from closeranks.checkpoint.storage.lease import Lease, Terms, decode
from closeranks.checkpoint.storage.protocol import DeniedError, StorageError
from closeranks.checkpoint.storage.remote import RemoteStorage

TERMS = Terms(renew_s=0.05, lease_s=0.4, poll_s=0.01)


@pytest.fixture
def opener(prefix: str) -> Callable[[], RemoteStorage]:
    return lambda: RemoteStorage(f"memory://{prefix}", terms=TERMS)


def test_a_lease_comes_back_as_it_was_written() -> None:
    assert decode(Lease("me", 12.5).encode()) == Lease("me", 12.5)


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
    opener: Callable[[], RemoteStorage], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lease has long passed by our clock, but it is renewed while we watch."""
    storage = opener()
    with storage.lock("the holder"):
        now = time.time
        monkeypatch.setattr(time, "time", lambda: now() + (1000 if threading.current_thread().name != "lease" else 0))
        with pytest.raises(DeniedError, match="the holder"), opener().lock("one from the future"):
            pytest.fail("two hold it")


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
    assert Terms().lease_s >= 3 * Terms().renew_s
    assert Terms().watch_s > Terms().renew_s
