"""The cache alone: pieces come from memory, several caches on one folder stand for several processes."""

from __future__ import annotations

import errno
import mmap
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from blake3 import blake3

from closeranks.core.errors import DataError
from closeranks.data.files.cache import FileCache, PrefetchOutcome
from closeranks.data.files.cache_space import CLAIM, PART, CacheTimeouts
from closeranks.data.files.cache_write import RemoteFileVersion
from closeranks.data.files.flocks import try_exclusive
from closeranks.data.timing import measure
from tests.checkpoint.test_write_faults import tmpfs
from tests.data.files.conftest import as_nobody

SOON = CacheTimeouts(space_s=0.2, lock_s=0.2, stall_s=0.2, poll_s=0.005)
KB = 1000


class Far:
    """Files that lie far away, and how often each was fetched."""

    def __init__(self, num_bytes: dict[str, int]) -> None:
        self.data = {name: os.urandom(size) for name, size in num_bytes.items()}
        self.fetched: list[str] = []

    def item(self, name: str, digest: str = "") -> RemoteFileVersion:
        return RemoteFileVersion(f"s3://far/{name}", len(self.data[name]), "1", digest)

    def bring(self, name: str) -> Generator[bytes, None, None]:
        self.fetched.append(name)
        for start in range(0, len(self.data[name]), 10 * KB):
            yield self.data[name][start : start + 10 * KB]

    def read(self, cache: FileCache, name: str, digest: str = "") -> bytes:
        held = cache.acquire(self.item(name, digest), lambda: self.bring(name))
        try:
            return held.path.read_bytes()
        finally:
            held.release()

    def ahead(self, cache: FileCache, name: str, *wanted: str) -> PrefetchOutcome:
        names = [cache.path_of(self.item(other)).name for other in wanted]
        return cache.prefetch(self.item(name), lambda: self.bring(name), lambda: names)


@pytest.fixture
def far() -> Far:
    return Far(dict.fromkeys("abcdefgh", 100 * KB) | {"none": 0, "small": 1, "double": 200 * KB, "huge": 1000 * KB})


def names_in(folder: Path) -> list[str]:
    """Of the files that are there whole; anything else but the lock and claims is left over."""
    names = [path.name for path in folder.iterdir() if path.name != ".lock" and not path.name.startswith(CLAIM)]
    assert all(name.startswith("file-") for name in names), names
    return sorted(name.rpartition("-")[2] for name in names)


def test_a_file_is_fetched_once_and_again_only_in_another_version(tmp_path: Path, far: Far) -> None:
    here, there = FileCache(tmp_path / "cache", 10**6), FileCache(tmp_path / "cache", 10**6)
    for name in ("a", "none", "small"):
        for cache in (here, there, pickle.loads(pickle.dumps(here))):
            assert far.read(cache, name) == far.data[name]
    assert far.fetched == ["a", "none", "small"]
    newer = RemoteFileVersion("s3://far/a", 3, "2")
    held = here.acquire(newer, lambda: (part for part in [b"1", b"23"]))
    assert held.path.read_bytes() == b"123"
    held.release()
    assert far.read(there, "a") == far.data["a"]
    assert far.fetched == ["a", "none", "small"]


def test_names_are_safe_and_tell_apart() -> None:
    odd = RemoteFileVersion("s3://far/" + "ü/../" + "x" * 300 + " y?.tar", 1, '"1"')
    assert "/" not in odd.key
    assert odd.key.endswith("xxx_y_.tar")
    assert len(f"part-{odd.key}") < 130
    keys = {RemoteFileVersion(url, 1, version).key for url in ("s3://a/b", "s3://b/b") for version in ("1", "2")}
    assert len(keys) == 4


def test_what_was_used_longest_ago_makes_room(tmp_path: Path, far: Far) -> None:
    cache = FileCache(tmp_path, 300 * KB)
    for name in "abcab":
        far.read(cache, name)
    assert far.fetched == list("abc")
    far.read(cache, "d")
    assert names_in(tmp_path) == ["a", "b", "d"]
    assert far.read(cache, "c") == far.data["c"]
    assert names_in(tmp_path) == ["b", "c", "d"]


def test_a_file_is_in_use_until_it_is_let_go(tmp_path: Path, far: Far) -> None:
    cache = FileCache(tmp_path, 200 * KB)
    held = cache.acquire(far.item("a"), lambda: far.bring("a"))
    far.read(cache, "b")
    held.release()
    far.read(cache, "c")
    assert names_in(tmp_path) == ["a", "c"]


def test_what_is_held_stays_and_its_bytes_stay_valid(tmp_path: Path, far: Far) -> None:
    cache, other = FileCache(tmp_path, 300 * KB), FileCache(tmp_path, 300 * KB)
    held = cache.acquire(far.item("a"), lambda: far.bring("a"))
    with held.path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        for name in "bcdefgh" * 3:
            assert far.read(other, name) == far.data[name]
        assert bytes(mapped) == far.data["a"] == far.read(other, "a"), "others read it at the same time"
        assert "a" in names_in(tmp_path)
    held.release()
    for name in "bcd":
        far.read(other, name)
    assert "a" not in names_in(tmp_path)


def test_where_all_is_held_one_waits_and_then_says_what_to_set(tmp_path: Path, far: Far) -> None:
    cache = FileCache(tmp_path, 250 * KB, SOON)
    held = [cache.acquire(far.item(name), lambda name=name: far.bring(name)) for name in "ab"]
    with pytest.raises(DataError, match=r"no room for s3://far/c .* in the cache .*Set data.cache_bytes higher"):
        far.read(cache, "c")
    assert names_in(tmp_path) == ["a", "b"]
    held[0].release()
    assert far.read(cache, "c") == far.data["c"]
    held[1].release()


def test_nothing_goes_in_vain(tmp_path: Path, far: Far) -> None:
    cache = FileCache(tmp_path, 300 * KB, SOON)
    held = [cache.acquire(far.item(name), lambda name=name: far.bring(name)) for name in "ab"]
    far.read(cache, "c")
    with pytest.raises(DataError, match="no room"):
        far.read(cache, "double")
    assert names_in(tmp_path) == ["a", "b", "c"]
    held[0].release()
    assert far.read(cache, "double") == far.data["double"]
    assert names_in(tmp_path) == ["b", "double"]
    held[1].release()


def test_room_that_is_let_go_is_waited_for(tmp_path: Path, far: Far) -> None:
    cache = FileCache(tmp_path, 150 * KB, CacheTimeouts(space_s=20, poll_s=0.005))
    held = cache.acquire(far.item("a"), lambda: far.bring("a"))
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(far.read, cache, "b")
        assert not coming.done()
        held.release()
        assert coming.result(20) == far.data["b"]


def test_a_file_larger_than_the_cache_is_refused(tmp_path: Path, far: Far) -> None:
    with pytest.raises(DataError, match=r"huge has .* and the cache may take .*data.cache_bytes"):
        far.read(FileCache(tmp_path, 999 * KB), "huge")
    assert far.fetched == []


def test_many_at_once_fetch_each_file_once(tmp_path: Path, far: Far) -> None:
    caches = [FileCache(tmp_path, 10**6) for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda cache: [far.read(cache, name) for name in "abcdefgh"], caches))
    assert found == [[far.data[name] for name in "abcdefgh"]] * 8
    assert sorted(far.fetched) == list("abcdefgh")


def test_a_damaged_entry_is_thrown_away_and_fetched_again(tmp_path: Path, far: Far) -> None:
    digest = blake3(far.data["a"]).hexdigest()
    far.read(FileCache(tmp_path, 10**6), "a")
    [path] = tmp_path.glob("file-*")
    os.truncate(path, 50 * KB)
    assert far.read(FileCache(tmp_path, 10**6), "a") == far.data["a"]
    assert far.fetched == ["a", "a"]
    with path.open("r+b") as file:
        file.write(bytes([far.data["a"][0] ^ 1]))
    assert far.read(FileCache(tmp_path, 10**6), "a") != far.data["a"], "its size is right, and nobody knows its digest"
    assert far.read(FileCache(tmp_path, 10**6), "a", digest) == far.data["a"]
    assert far.fetched == ["a", "a", "a"]


def test_what_comes_damaged_is_refused_and_leaves_nothing(tmp_path: Path, far: Far) -> None:
    cache = FileCache(tmp_path, 10**6)
    with pytest.raises(DataError, match="s3://far/a is damaged"):
        far.read(cache, "a", blake3(b"other").hexdigest())
    assert far.fetched == ["a"]
    for pieces in ([b"12"], [b"1234"], [b"12", b"34"]):
        with pytest.raises(DataError, match=rf"x should have 3 bytes, and {len(b''.join(pieces))} came"):
            cache.acquire(RemoteFileVersion("s3://far/x", 3, "1"), lambda pieces=pieces: (piece for piece in pieces))
    assert names_in(tmp_path) == []


def test_an_error_on_the_way_leaves_nothing_and_the_next_begins_anew(tmp_path: Path, far: Far) -> None:
    def breaks() -> Generator[bytes, None, None]:
        yield far.data["a"][:KB]
        raise DataError("the line is dead")

    cache = FileCache(tmp_path, 10**6)
    with pytest.raises(DataError, match="the line is dead"):
        cache.acquire(far.item("a"), breaks)
    assert names_in(tmp_path) == []
    assert far.read(cache, "a") == far.data["a"]


def test_what_a_killed_process_left_is_neither_counted_nor_used(tmp_path: Path, far: Far) -> None:
    cache = FileCache(tmp_path, 250 * KB)
    for name in (f"{PART}{far.item('a').key}", f"{PART}0-other", f"{CLAIM}77-0"):
        (tmp_path / name).write_bytes(bytes(200 * KB))
    assert far.read(cache, "a") == far.data["a"]
    assert far.read(cache, "b") == far.data["b"]
    assert names_in(tmp_path) == ["a", "b"]


def test_what_a_killed_process_left_of_the_file_itself_takes_no_room(tmp_path: Path, far: Far) -> None:
    (tmp_path / f"{PART}{far.item('a').key}").write_bytes(bytes(100 * KB))
    assert far.read(FileCache(tmp_path, 100 * KB, SOON), "a") == far.data["a"]


def test_one_who_makes_no_progress_is_not_waited_for_for_ever(tmp_path: Path, far: Far) -> None:
    stuck = try_exclusive(tmp_path / f"{PART}{far.item('a').key}", create=True)
    assert stuck is not None
    with pytest.raises(DataError, match=r"another process fetches s3://far/a .* no progress"):
        far.read(FileCache(tmp_path, 10**6, SOON), "a")
    stuck.release()
    stuck = try_exclusive(tmp_path / ".lock", create=True)
    assert stuck is not None
    with pytest.raises(DataError, match=r"the lock on \S+/\.lock in the cache was not released"):
        far.read(FileCache(tmp_path, 10**6, SOON), "a")
    stuck.release()
    assert far.read(FileCache(tmp_path, 10**6, SOON), "a") == far.data["a"]
    stuck = try_exclusive(FileCache(tmp_path, 10**6).path_of(far.item("a")))
    assert stuck is not None
    with pytest.raises(DataError, match=r"the lock on \S+-a in the cache was not released"):
        far.read(FileCache(tmp_path, 10**6, SOON), "a")
    stuck.release()


def test_other_things_in_the_folder_are_left_alone(tmp_path: Path, far: Far) -> None:
    (tmp_path / "index").mkdir()
    (tmp_path / "notes.txt").write_bytes(bytes(900 * KB))
    cache = FileCache(tmp_path, 150 * KB)
    far.read(cache, "a")
    far.read(cache, "b")
    assert (tmp_path / "notes.txt").stat().st_size == 900 * KB
    assert (tmp_path / "index").is_dir()


def test_many_small_files_stay_below_the_limit_with_claims(tmp_path: Path) -> None:
    """Claims are a 1024th of the cache, and serve files of up to a 16th of that."""
    far = Far({f"n{number}": number % 60 for number in range(300)})
    num_bytes = sum(map(len, far.data.values()))
    caches = [FileCache(tmp_path, 1 << 20) for _ in range(3)]
    for cache in caches:
        for name in far.data:
            assert far.read(cache, name) == far.data[name]
    assert len(far.fetched) == 300
    [claim] = tmp_path.glob(f"{CLAIM}*")
    assert claim.stat().st_size < 1 << 10
    caches[0].close()
    assert len(names_in(tmp_path)) == 300
    assert list(tmp_path.glob(f"{CLAIM}*")) == []
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) == num_bytes
    tight = FileCache(tmp_path, num_bytes)
    assert far.read(tight, "n59") == far.data["n59"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with tmpfs(tmp_path / "disk", "1m") as place:
        yield place


def test_a_full_disk_makes_old_files_go_and_then_is_a_sentence(small_disk: Path, far: Far) -> None:
    cache = FileCache(small_disk, 10**9)
    (small_disk / "foreign").write_bytes(bytes(400 * KB))
    for name in "abcdefgh" * 2:
        assert far.read(cache, name) == far.data[name]
    assert 1 <= len(list(small_disk.glob("file-*"))) < 7
    with pytest.raises(DataError, match=rf"the disk of the cache {small_disk} is full.*set data.cache"):
        far.read(cache, "huge")
    held = [path.name for path in small_disk.iterdir() if path.name.startswith("part-")]
    assert held == []
    assert far.read(cache, "a") == far.data["a"]


def test_a_cache_that_may_not_be_written_is_a_sentence(tmp_path: Path, far: Far) -> None:
    with as_nobody(), pytest.raises(DataError, match=r"the cache cannot be used: .*Permission denied.*data.cache"):
        far.read(FileCache(tmp_path / "cache", 10**6), "a")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DataError, match=rf"the cache {tmp_path}/file/cache failed: .*Not a directory"):
        far.read(FileCache(tmp_path / "file" / "cache", 10**6), "a")


def test_a_cache_that_was_removed_begins_anew(tmp_path: Path, far: Far) -> None:
    cache = FileCache(tmp_path / "cache", 10**6)
    far.read(cache, "a")
    (tmp_path / "cache").rename(tmp_path / "gone")
    assert far.read(cache, "a") == far.data["a"]
    assert far.fetched == ["a", "a"]


def test_ahead_never_drives_out_what_is_needed_sooner(tmp_path: Path, far: Far) -> None:
    cache, other = FileCache(tmp_path, 300 * KB), FileCache(tmp_path, 300 * KB)
    far.read(cache, "a")
    assert [far.ahead(cache, name, "b", "c", "d") for name in "bcd"] == [PrefetchOutcome.HERE] * 3
    assert names_in(tmp_path) == ["b", "c", "d"], "what was used made room"
    assert far.ahead(cache, "e", "b", "c", "d", "e") is PrefetchOutcome.NO_SPACE
    assert far.ahead(other, "e", "e") is PrefetchOutcome.NO_SPACE, "of another process's wishes, too"
    assert far.read(other, "f") == far.data["f"], "what is needed now goes before all wishes"
    assert "b" in names_in(tmp_path), "the one needed first stays longest"
    held = cache.acquire(far.item("b"), lambda: far.bring("b"))
    held.release()
    assert far.fetched == list("abcdf")


def test_ahead_waits_for_nobody(tmp_path: Path, far: Far) -> None:
    cache = FileCache(tmp_path, 300 * KB)
    part = try_exclusive(tmp_path / f"{PART}{far.item('a').key}", create=True)
    assert part is not None
    assert far.ahead(cache, "a", "a") is PrefetchOutcome.ELSEWHERE
    part.release()
    assert far.ahead(cache, "huge", "huge") is PrefetchOutcome.NO_SPACE
    assert far.ahead(cache, "a", "a") is PrefetchOutcome.HERE
    assert far.fetched == ["a"]


def test_waiting_counts_as_fetching(tmp_path: Path, far: Far) -> None:
    go_on = threading.Event()

    def slow() -> Generator[bytes, None, None]:
        go_on.wait(0.1)
        yield from far.bring("a")

    cache = FileCache(tmp_path, 10**6)
    with measure() as times:
        cache.acquire(far.item("a"), slow).release()
    assert times.fetch_s >= 0.1 > times.read_s
    with measure() as times:
        far.read(cache, "a")
    assert times.fetch_s == 0


def test_a_fault_of_the_disk_is_named(tmp_path: Path, far: Far, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fdatasync", fails)
    with pytest.raises(DataError, match=rf"the cache {tmp_path} failed: .*Input/output error"):
        far.read(FileCache(tmp_path, 10**6), "a")
    assert names_in(tmp_path) == []


def test_a_claim_goes_with_its_process_though_nobody_closed_the_cache(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from closeranks.data.files.cache import FileCache;"
        "from closeranks.data.files.cache_write import RemoteFileVersion;"
        "cache = FileCache(Path(sys.argv[1]), 1 << 20);"
        "cache.acquire(RemoteFileVersion('s3://far/a', 5, '1', ''), lambda: (piece for piece in [b'hello'])).release();"
        "print(len(list(Path(sys.argv[1]).glob('claim-*'))))"
    )
    done = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("1\n", "")
    assert list(tmp_path.glob(f"{CLAIM}*")) == []
    assert len(names_in(tmp_path)) == 1
