"""Several processes of a host, one cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path

import pytest

from closeranks.data.files.cache_space import CLAIM, FILE, PART, CacheSpace, CacheTimeouts
from closeranks.storage.object_store.download import RANGE_BYTES
from tests.data.files.test_remote import DATA, SIZES, gets, upload
from tests.storage import servers
from tests.storage.proxy import Rule, Standing, pausing
from tests.storage.servers import Server

pytestmark = pytest.mark.world

READER = """
import hashlib, json, random, sys
from closeranks.data.files.open import open_files
url, cache, cache_bytes, seed, num_rounds = sys.argv[1:]
files = open_files(url, cache=cache, cache_bytes=int(cache_bytes))
dice = random.Random(int(seed))
names = [info.name for info in files.list()]
print("ready", flush=True)
sys.stdin.readline()
digests = []
for _ in range(int(num_rounds)):
    dice.shuffle(names)
    for at, name in enumerate(names):
        files.prefetch(names[at : at + 4])
        with files.local_path(name) as path:
            digests.append([name, hashlib.sha256(path.read_bytes()).hexdigest()])
files.close()
print(json.dumps(digests))
"""


@dataclass(frozen=True)
class Place:
    endpoint: str
    url: str
    cache: Path
    cache_bytes: int = 10**9


class Readers:
    """Processes that read all files of a place, each in an order of its own."""

    def __init__(self, place: Place, num: int, num_rounds: int = 1, kill_at: str = "") -> None:
        command = [sys.executable, "-W", "error", "-c", READER, place.url, str(place.cache), str(place.cache_bytes)]
        settings = {"FSSPEC_S3": json.dumps(servers.options(place.endpoint)), "CLOSERANKS_KILL_AT": kill_at}
        start = partial(subprocess.Popen, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._processes: list[subprocess.Popen[str]] = [
            start([*command, str(seed), str(num_rounds)], env={**os.environ, **settings}) for seed in range(num)
        ]
        for process in self._processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"

    def go(self) -> None:
        """All at once from here on."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()

    def results(self) -> list[list[list[str]]]:
        found = [process.communicate(timeout=300)[0] for process in self._processes]
        assert [process.returncode for process in self._processes] == [0] * len(found)
        return [sorted(json.loads(text)) for text in found]

    def died(self) -> bool:
        for process in self._processes:
            process.communicate(timeout=300)
        return all(process.returncode == -9 for process in self._processes)


def digests(data: dict[str, bytes], num_rounds: int = 1) -> list[list[str]]:
    return sorted([name, sha256(content).hexdigest()] for name, content in data.items() for _ in range(num_rounds))


def test_several_processes_fetch_each_file_once(moto: Server, prefix: str, tmp_path: Path, proxied: Standing) -> None:
    data = {**DATA, "large.bin": os.urandom(2 * RANGE_BYTES + 5)}
    upload(moto, prefix, data)
    with proxied(moto.endpoint) as proxy:
        readers = Readers(Place(proxy.endpoint, f"s3://{prefix}", tmp_path / "cache"), num=3)
        readers.go()
        assert readers.results() == [digests(data)] * 3
        assert gets(proxy) == {**{name.rpartition("/")[2]: 1 for name in SIZES}, "large.bin": 3}
    assert len(list((tmp_path / "cache").glob("file-*"))) == len(data)
    assert list((tmp_path / "cache").glob("part-*")) == []


def watched(folder: Path, limit: int, done: threading.Event, seen: list[int]) -> None:
    """What lies in the cache, looked at under its lock: without, what is renamed meanwhile would count twice."""
    room = CacheSpace(folder, limit, CacheTimeouts())
    while not done.is_set():
        with room.locked():
            sizes = []
            for path in folder.iterdir():
                with suppress(FileNotFoundError):  # given up meanwhile
                    sizes.append(path.stat().st_size if path.name.startswith((FILE, PART, CLAIM)) else 0)
            seen.append(sum(sizes))


def test_a_cache_smaller_than_the_data_is_never_exceeded(moto: Server, prefix: str, tmp_path: Path) -> None:
    """Room for six of twelve files, three processes with wishes that do not all fit, and one that is killed."""
    upload(moto, prefix)
    place = Place(moto.endpoint, f"s3://{prefix}", tmp_path / "cache", 6 * 20_100)
    place.cache.mkdir()
    done, seen = threading.Event(), [0]
    readers, victim = Readers(place, num=3, num_rounds=2), Readers(place, num=1, kill_at="piece cached:3")
    watcher = threading.Thread(target=watched, args=(place.cache, place.cache_bytes, done, seen))
    watcher.start()
    try:
        victim.go()
        assert victim.died()
        readers.go()
        found = readers.results()
    finally:
        done.set()
        watcher.join()
    assert found == [digests(DATA, 2)] * 3
    assert place.cache_bytes // 2 < max(seen) <= place.cache_bytes
    assert len(seen) > 20


@pytest.mark.parametrize("label", ["piece cached:2", "file whole aside"])
def test_where_the_fetching_process_is_killed_another_takes_over(
    moto: Server, prefix: str, tmp_path: Path, proxied: Standing, label: str
) -> None:
    """The second stands ready when the first, which has the lock, dies in the middle of the file."""
    data = {"large.bin": os.urandom(2 * RANGE_BYTES + 5)}
    upload(moto, prefix, data)
    asked, second_is_ready = threading.Event(), threading.Event()
    with proxied(moto.endpoint, Rule("GET", "large.bin", times=3, then=pausing(asked, second_is_ready))) as proxy:
        place = Place(proxy.endpoint, f"s3://{prefix}", tmp_path / "cache")
        first = Readers(place, num=1, kill_at=label)
        first.go()
        assert asked.wait(120)
        second = Readers(place, num=1)
        second.go()
        second_is_ready.set()
        assert second.results() == [digests(data)]
        assert first.died()
        assert 4 <= gets(proxy)["large.bin"] <= 6
    assert [path.name[:5] for path in place.cache.iterdir() if path.name != ".lock"] == ["file-"]
