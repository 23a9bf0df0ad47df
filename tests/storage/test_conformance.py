"""One suite that every storage must pass: a disk, a remote file system in memory, and two S3 servers."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from closeranks.storage.lease import InUseError, LeaseTimes
from closeranks.storage.local import LocalStorage
from closeranks.storage.object_store.download import RANGE_BYTES
from closeranks.storage.object_store.remote import RemoteStorage
from closeranks.storage.object_store.retry import RetryPolicy
from closeranks.storage.protocol import (
    ChangedError,
    DeniedError,
    ExistsError,
    MissingError,
    StoppedError,
    Storage,
    StorageError,
)
from tests.storage import servers

PART = 256 << 10
SOON = RetryPolicy(num_tries=6, first_s=0.01, longest_s=0.05)
TERMS = LeaseTimes(renew_s=0.2, lease_s=5.0, poll_s=0.02)

Opener = Callable[[], Storage]


@pytest.fixture(params=["local", "memory", "moto", "rclone"])
def opener(request: pytest.FixtureRequest, tmp_path: Path, prefix: str) -> Iterator[Opener]:
    """Opens the same place again and again, as different processes would."""
    kind = request.param
    if kind == "local":
        yield lambda: LocalStorage(tmp_path / "checkpoints")
    elif kind == "memory":
        yield lambda: RemoteStorage(f"memory://{prefix}", policy=SOON, part_bytes=PART, times=TERMS)
    else:
        options = servers.options(request.getfixturevalue(kind).endpoint)
        yield lambda: RemoteStorage(f"s3://{prefix}", options, policy=SOON, part_bytes=PART, times=TERMS)


@pytest.fixture
def storage(opener: Opener) -> Storage:
    return opener()


def put(storage: Storage, name: str, data: bytes, step: int = 100_000) -> None:
    sink = storage.create(name, len(data))
    for start in range(0, len(data), step):
        sink.write(memoryview(data)[start : start + step])
    sink.close()


@pytest.mark.parametrize("num_bytes", [0, 1, PART, 2 * PART + 4097])
def test_a_file_comes_back_as_it_was_written(storage: Storage, num_bytes: int) -> None:
    data = os.urandom(num_bytes)
    put(storage, "step-00000001/data", data, step=150_000)
    assert storage.size("step-00000001/data") == num_bytes
    assert storage.read("step-00000001/data") == data
    assert b"".join(storage.read_fresh("step-00000001/data", 100_000)) == data


def test_a_range_is_exact_or_refused(storage: Storage) -> None:
    data = os.urandom(100_000)
    put(storage, "data", data)
    assert storage.read("data", 5, 0) == b""
    assert storage.read("data", 5, 1) == data[5:6]
    assert storage.read("data", 99_990) == data[99_990:]
    assert storage.read("data", 99_990, 10) == data[99_990:]
    for start, num_bytes in ((99_990, 11), (0, 100_001), (100_000, 1), (200_000, 5)):
        with pytest.raises(StorageError, match="data"):
            storage.read("data", start, num_bytes)


def test_names_are_those_of_one_folder_and_never_stale(opener: Opener) -> None:
    here, there = opener(), opener()
    assert here.names() == there.names("none") == []
    here.publish("step-00000001/manifest.json", b"{}")
    here.publish("latest", b"1")
    assert there.names() == ["latest", "step-00000001/"]
    here.publish("step-00000001/part", b"2")
    assert there.names("step-00000001") == ["manifest.json", "part"]
    here.remove("step-00000001/part")
    assert there.names("step-00000001") == ["manifest.json"]
    assert there.names("step-0") == []


def test_entries_are_all_that_is_shown_however_deep(opener: Opener) -> None:
    here, there = opener(), opener()
    assert here.entries() == []
    sizes = {"b": 3, "a/deep/er": 5, "a/x": 0, "a.b": 1, "with space + plus%": 2}
    for name, num_bytes in sizes.items():
        put(here, name, b"x" * num_bytes)
    put(here, ".hidden/a", b"1")
    put(here, "a/.hidden", b"1")
    found = there.entries()
    assert [(entry.name, entry.num_bytes) for entry in found] == sorted(sizes.items())
    assert [there.entry(entry.name) for entry in found] == found
    for name in ("nothing", "a"):
        with pytest.raises(MissingError, match=name):
            there.entry(name)


@pytest.mark.parametrize("num_bytes", [0, 1, RANGE_BYTES, 2 * RANGE_BYTES + 4097])
def test_a_file_is_fetched_as_it_was_listed(opener: Opener, num_bytes: int) -> None:
    data = os.urandom(num_bytes)
    put(opener(), "a/data", data, step=1 << 20)
    [entry] = opener().entries()
    assert b"".join(opener().fetch(entry)) == data


@pytest.mark.parametrize("num_bytes", [999, 1000, 1001, 0])
def test_another_file_is_not_fetched_in_its_stead(opener: Opener, num_bytes: int) -> None:
    put(opener(), "data", os.urandom(1000))
    entry = opener().entry("data")
    put(opener(), "data", os.urandom(num_bytes))
    with pytest.raises(ChangedError, match="data"):
        list(opener().fetch(entry))
    opener().remove("data")
    with pytest.raises(MissingError, match="data"):
        list(opener().fetch(entry))


def test_fetching_ends_when_nobody_wants_it_any_more(storage: Storage) -> None:
    put(storage, "data", os.urandom(3 * RANGE_BYTES), step=1 << 20)
    stop = threading.Event()
    coming = storage.fetch(storage.entry("data"), stop)
    next(coming)
    stop.set()
    with pytest.raises(StoppedError, match="given up"):
        list(coming)


def test_a_document_is_replaced_only_when_asked(opener: Opener) -> None:
    here, there = opener(), opener()
    here.publish("manifest.json", b"first")
    for storage in (here, there):
        with pytest.raises(ExistsError, match=r"manifest\.json"):
            storage.publish("manifest.json", b"second")
    assert there.read("manifest.json") == b"first"
    there.publish("manifest.json", b"third", replace=True)
    assert here.read("manifest.json") == b"third"
    assert here.size("manifest.json") == 5


def test_what_is_missing_is_called_missing(storage: Storage) -> None:
    for ask in (storage.size, storage.read, lambda name: list(storage.read_fresh(name, 10))):
        with pytest.raises(MissingError, match="nothing/here"):
            ask("nothing/here")
    storage.remove("nothing/here")
    storage.remove_folder("nothing")


def test_an_aborted_file_is_not_there(storage: Storage) -> None:
    sink = storage.create("step-00000001/data", 3 * PART)
    sink.write(os.urandom(2 * PART + 1))
    sink.abort()
    assert storage.names("step-00000001") == []
    sink = storage.create("step-00000001/data", 10)
    sink.write(b"123")
    with pytest.raises(StorageError, match="3 bytes instead of 10"):
        sink.close()
    sink.abort()
    assert storage.names("step-00000001") == []


def test_an_unfinished_file_is_replaced(storage: Storage) -> None:
    storage.create("data", 100).write(b"x" * 50)
    put(storage, "data", b"whole")
    assert storage.read("data") == b"whole"


def test_a_folder_goes_with_all_that_is_in_it(storage: Storage) -> None:
    for name in ("step-00000001/data", "step-00000001/deep/er", "step-00000010/data", "latest"):
        storage.publish(name, b"1")
    storage.remove_folder("step-00000001")
    assert storage.names() == ["latest", "step-00000010/"]
    assert storage.names("step-00000001") == []


@pytest.mark.parametrize("name", ["../out", "/etc/passwd", "a//b", "", "a/./b", "a/.."])
def test_no_name_leads_out(storage: Storage, name: str) -> None:
    for act in (storage.read, storage.size, storage.remove, storage.remove_folder):
        with pytest.raises(StorageError, match="not a name inside"):
            act(name)
    with pytest.raises(StorageError, match="not a name inside"):
        storage.publish(name, b"1")
    with pytest.raises(StorageError, match="not a name inside"):
        storage.create(name, 1)


def test_one_holds_the_lock_and_is_named(opener: Opener) -> None:
    here, there = opener(), opener()
    with here.lock("the collector of run 7"):
        with pytest.raises(DeniedError, match=r"the collector of run 7, process \d+"), there.lock("prune"):
            pytest.fail("two hold it")
        assert here.names() == []
    with there.lock("prune"):
        pass


def test_an_error_inside_gives_the_lock_back(opener: Opener) -> None:
    with pytest.raises(RuntimeError, match="inside"), opener().lock("one"):
        raise RuntimeError("inside")
    with opener().lock("two"):
        pass


def test_a_lock_is_waited_for(opener: Opener) -> None:
    here, there = opener(), opener()
    order: list[str] = []
    is_held = threading.Event()

    def hold() -> None:
        with here.lock("first"):
            is_held.set()
            while len(order) < 1:
                waiting.join(0.01)
            order.append("given back")

    def wait() -> None:
        is_held.wait()
        order.append("waits")
        with there.lock("second", wait_s=20):
            order.append("taken")

    waiting, holding = threading.Thread(target=wait), threading.Thread(target=hold)
    waiting.start()
    holding.start()
    holding.join()
    waiting.join()
    assert order == ["waits", "given back", "taken"]


def test_one_run_owns_a_place_while_saves_and_prunes_lock_it_for_a_moment(opener: Opener) -> None:
    here, there = opener(), opener()
    with here.own("a run") as mine:
        with (
            pytest.raises(InUseError, match=r"a run, process \d+ on .* since 20") as refused,
            there.own("a second run"),
        ):
            pytest.fail("two own it")
        assert refused.value.rival.pid == os.getpid()
        with there.lock("prune"):
            pass
        assert here.names() == []
        assert not mine.is_gone
    with there.own("a second run"):
        pass
