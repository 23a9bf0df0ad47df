"""What only a disk does: full, read-only, torn, killed at any moment, cached."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from closeranks.storage.local import LocalStorage
from closeranks.storage.protocol import (
    DeniedError,
    ExistsError,
    FullError,
    MissingError,
    StorageError,
)
from tests.storage.test_conformance import put

MIB = 1 << 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, 4 MiB large."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    place = tmp_path / "small"
    place.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", place], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"mount is not allowed here: {made.stderr.strip()}")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def test_a_file_that_cannot_fit_is_refused_before_a_byte_is_written(small_disk: Path) -> None:
    storage = LocalStorage(small_disk)
    with pytest.raises(FullError, match=r"the disk is full: .*data needs 5\.0 MiB, and \d\.\d MiB are free"):
        storage.create("data", 5 * MIB)
    assert storage.names() == []


def test_a_disk_that_fills_up_meanwhile(small_disk: Path) -> None:
    """The file fails, its room comes back, the documents that stood still stand, and the next file succeeds."""
    storage = LocalStorage(small_disk)
    storage.publish("latest", b"old")
    sink = storage.create("data", 3 * MIB)
    rival = small_disk / "rival"
    rival.write_bytes(bytes(2 * MIB))
    with pytest.raises(FullError, match="data failed: no space is left"):
        sink.write(bytes(3 * MIB))
    with pytest.raises(FullError, match="latest failed: no space is left"):
        storage.publish("latest", bytes(2 * MIB), replace=True)
    assert storage.read("latest") == b"old"
    sink.abort()
    rival.unlink()
    assert sorted(os.listdir(small_disk)) == ["latest"]
    put(storage, "data", bytes(3 * MIB), step=MIB)
    assert storage.size("data") == 3 * MIB


def test_a_read_only_disk_is_read_and_nothing_else(small_disk: Path) -> None:
    storage = LocalStorage(small_disk)
    storage.publish("latest", b"1")
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    assert storage.read("latest") == b"1"
    acts = (
        lambda: storage.create("data", 1),
        lambda: storage.publish("latest", b"2", replace=True),
        lambda: storage.publish("step-00000001/manifest.json", b"2"),
        lambda: storage.remove("latest"),
        lambda: storage.lock("me").__enter__(),
    )
    for act in acts:
        with pytest.raises(DeniedError, match=f"{small_disk}.*read-only") as caught:
            act()
        assert caught.value.is_final
    assert storage.names() == ["latest"]


@pytest.fixture
def failing_disk(small_disk: Path, tmp_path: Path) -> Iterator[Path]:
    """A disk of 32 MiB that has only 4 MiB to write to: what does not fit is lost when the kernel writes it out."""
    image, place = small_disk / "image", tmp_path / "failing"
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(32 * MIB)
    steps = (["mkfs.ext4", "-q", "-O", "^has_journal", image], ["mount", "-o", "loop", image, place])
    for step in steps:
        done = subprocess.run(step, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"no loop device here: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", place], check=True)


def test_what_the_disk_lost_is_told_when_the_file_is_closed(failing_disk: Path) -> None:
    storage = LocalStorage(failing_disk)
    storage.publish("latest", b"old")
    sink = storage.create("data", 8 * MIB)
    sink.write(os.urandom(8 * MIB))
    with pytest.raises(
        StorageError, match=r"data failed: (the device reported an input/output error|no space is left)"
    ):
        sink.close()
    sink.abort()
    assert storage.names() == ["latest", "lost+found/"]
    assert storage.read("latest") == b"old"


def test_an_input_output_error_is_told() -> None:
    """Page 0 of a process cannot be read: a real EIO."""
    with pytest.raises(StorageError, match="reading /proc/self/mem failed: the device reported an input/output error"):
        LocalStorage(Path("/proc/self")).read("mem", 0, 1)


def test_a_torn_file_is_told(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    put(storage, "data", bytes(1000))
    os.truncate(tmp_path / "data", 700)
    with pytest.raises(StorageError, match=r"data is truncated: 200 of 300 bytes are there from byte 500 on"):
        storage.read("data", 500, 300)


def test_a_file_that_shrinks_while_it_is_read_back(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    put(storage, "data", bytes(300_000))
    chunks = storage.read_fresh("data", 100_000)
    next(chunks)
    os.truncate(tmp_path / "data", 150_000)
    with pytest.raises(StorageError, match="shrank"):
        list(chunks)


def test_a_file_in_the_way_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "step-00000001").write_bytes(b"")
    storage = LocalStorage(tmp_path)
    with pytest.raises(StorageError, match="step-00000001"):
        storage.publish("step-00000001/manifest.json", b"1")
    with pytest.raises(MissingError, match="a part of the path is a file"):
        storage.read("step-00000001/manifest.json")
    assert storage.names("step-00000001") == []


def is_cached(path: Path) -> bool:
    with path.open("rb") as file:
        try:
            return os.preadv(file.fileno(), [bytearray(4096)], 0, os.RWF_NOWAIT) > 0
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno != errno.EOPNOTSUPP:
                raise
            return pytest.skip("this file system does not tell what is cached")


def test_reading_back_goes_past_the_page_cache(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    data = os.urandom(3 * MIB + 17)
    put(storage, "data", data)
    if not is_cached(tmp_path / "data"):
        pytest.skip("nothing is cached here")
    chunks = storage.read_fresh("data", MIB)
    seen = [next(chunks)]
    assert not is_cached(tmp_path / "data")
    assert b"".join(seen + list(chunks)) == data


def test_of_many_at_once_one_publishes(tmp_path: Path) -> None:
    num_writers = 8
    together = threading.Barrier(num_writers)
    outcomes: list[object] = [None] * num_writers

    def publish(turn: int) -> None:
        storage = LocalStorage(tmp_path)
        together.wait()
        try:
            storage.publish("manifest.json", f"writer {turn}".encode() * 1000)
            outcomes[turn] = "won"
        except ExistsError as error:
            outcomes[turn] = error

    for _ in range(5):
        threads = [threading.Thread(target=publish, args=(turn,)) for turn in range(num_writers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert outcomes.count("won") == 1
        winner = outcomes.index("won")
        assert LocalStorage(tmp_path).read("manifest.json") == f"writer {winner}".encode() * 1000
        assert os.listdir(tmp_path) == ["manifest.json"]
        LocalStorage(tmp_path).remove("manifest.json")


def test_a_disk_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    storage = LocalStorage(tmp_path)
    storage.publish("manifest.json", b"1")
    with pytest.raises(ExistsError):
        storage.publish("manifest.json", b"2")
    assert storage.read("manifest.json") == b"1"
    assert os.listdir(tmp_path) == ["manifest.json"]


SAVE = """
import sys
from pathlib import Path
from closeranks.storage.local import LocalStorage
storage = LocalStorage(Path(sys.argv[1]))
sink = storage.create("step-00000002/data", 200)
sink.write(b"x" * 100)
sink.write(b"x" * 100)
sink.close()
storage.publish("step-00000002/manifest.json", b"new")
storage.publish("latest", b"new", replace=True)
storage.remove("step-00000001/manifest.json")
"""


@pytest.mark.parametrize(
    ("label", "manifest", "latest", "is_old_there"),
    [
        ("data chunk written", None, b"old", True),
        ("data file durable", None, b"old", True),
        ("document written aside", None, b"old", True),
        ("document in place", b"new", b"old", True),
        ("document written aside:2", b"new", b"old", True),
        ("document in place:2", b"new", b"new", True),
        ("file removed", b"new", b"new", False),
    ],
)
def test_a_kill_leaves_every_document_old_or_new(
    tmp_path: Path, label: str, manifest: bytes | None, latest: bytes, is_old_there: bool
) -> None:
    storage = LocalStorage(tmp_path)
    storage.publish("step-00000001/manifest.json", b"old")
    storage.publish("latest", b"old")
    environ = {**os.environ, "CLOSERANKS_KILL_AT": label}
    assert subprocess.run([sys.executable, "-c", SAVE, tmp_path], env=environ).returncode == -signal.SIGKILL
    names = storage.names("step-00000002")
    assert ("manifest.json" in names) == (manifest is not None)
    assert manifest is None or storage.read("step-00000002/manifest.json") == manifest
    assert storage.read("latest") == latest
    assert storage.names("step-00000001") == (["manifest.json"] if is_old_there else [])
    assert all(not name.startswith(".") for name in storage.names())
    storage.remove_stale(older_than_s=0)
    assert not list(tmp_path.glob(".*"))


HOLD = """
import sys
from pathlib import Path
from closeranks.storage.local import LocalStorage
with LocalStorage(Path(sys.argv[1])).lock("a writer"):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_lock_dies_with_its_holder(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    command = [sys.executable, "-c", HOLD, tmp_path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(DeniedError, match=f"a writer, process {holder.pid} on"), storage.lock("me"):
            pytest.fail("two hold it")
        holder.kill()
        holder.wait()
        with storage.lock("me"):
            pass
