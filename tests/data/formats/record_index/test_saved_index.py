"""An index is built once, appears whole or not at all, and is built again when it cannot be trusted."""

from __future__ import annotations

import logging
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from closeranks.core.errors import DataError
from closeranks.data.formats.record_index import index_file
from closeranks.data.formats.record_index import saved_index as index_module
from closeranks.data.formats.record_index.index_file import IndexKey, UnsoundIndex, read_index, write_index
from closeranks.data.formats.record_index.saved_index import Arrays, IndexLocation, MappedIndex, Progress, saved_index
from tests.data.formats.local_files import FolderFiles

FORK = multiprocessing.get_context("fork")


class Builder:
    def __init__(self, num_rows: int = 100) -> None:
        self.num_rows = num_rows
        self.num_calls = 0

    def __call__(self, progress: Progress) -> Arrays:
        self.num_calls += 1
        progress(1, 2)
        return {
            "offsets": np.arange(self.num_rows) * 7,
            "sizes": np.ones(self.num_rows, np.uint32),
            "none": np.empty(0),
        }


@pytest.fixture
def files(tmp_path: Path) -> FolderFiles:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a.bin").write_bytes(b"first")
    (folder / "b.bin").write_bytes(b"second")
    return FolderFiles(folder)


@pytest.fixture
def place(tmp_path: Path) -> IndexLocation:
    return IndexLocation(cache=str(tmp_path / "cache"))


def opened(
    place: IndexLocation, files: FolderFiles, build: Callable[[Progress], Arrays], **settings: int
) -> MappedIndex:
    return saved_index(place, files, files.list(), "rows", build, settings)


def index_paths(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and not path.name.endswith(".lock")]


def test_it_is_built_once_and_lies_beside_the_data(files: FolderFiles, place: IndexLocation) -> None:
    build = Builder()
    first, second = opened(place, files, build), opened(place, files, build)
    assert build.num_calls == 1
    np.testing.assert_array_equal(second["offsets"], np.arange(100) * 7)
    assert second["sizes"].dtype == np.uint32
    assert second["none"].shape == (0,)
    assert not second["offsets"].flags.writeable
    assert first.identity == second.identity
    assert second.path.parent == files.root / ".closeranks-index"


def test_settings_and_kinds_have_indexes_of_their_own(files: FolderFiles, place: IndexLocation) -> None:
    build = Builder()
    one, two = opened(place, files, build, length=1), opened(place, files, build, length=2)
    other = saved_index(place, files, files.list(), "others", build, {"length": 1})
    assert build.num_calls == 3
    assert len({one.identity, two.identity, other.identity}) == 3


def test_a_changed_file_makes_it_stale(files: FolderFiles, place: IndexLocation) -> None:
    build = Builder()
    opened(place, files, build)
    (files.root / "a.bin").write_bytes(b"FIRST")
    os.utime(files.root / "a.bin", ns=(1, 1))
    opened(place, files, build)
    assert build.num_calls == 2
    assert len(index_paths(files.root / ".closeranks-index")) == 1


def test_a_given_folder_is_used(files: FolderFiles, tmp_path: Path) -> None:
    index = opened(IndexLocation(folder=str(tmp_path / "mine")), files, Builder())
    assert index.path.parent == tmp_path / "mine"
    assert not (files.root / ".closeranks-index").exists()


def test_far_data_has_its_index_in_the_cache(files: FolderFiles, place: IndexLocation, tmp_path: Path) -> None:
    files.is_local = False
    assert opened(place, files, Builder()).path.parent == tmp_path / "cache" / "index"
    assert files.wanted == ["a.bin", "b.bin"]


def test_a_folder_that_cannot_be_written_gives_way_to_the_cache(
    files: FolderFiles, place: IndexLocation, tmp_path: Path
) -> None:
    (files.root / ".closeranks-index").write_text("a file where the folder would be")
    build = Builder()
    assert opened(place, files, build).path.parent == tmp_path / "cache" / "index"
    opened(place, files, build)
    assert build.num_calls == 1


def test_no_place_at_all_is_one_sentence(files: FolderFiles, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(DataError, match=r"cannot be saved in '.*taken/index'.*data\.index"):
        opened(IndexLocation(folder=str(tmp_path / "taken" / "index")), files, Builder())


def test_a_full_disk_moves_the_finished_work_elsewhere(
    files: FolderFiles, place: IndexLocation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, subject: IndexKey, arrays: Arrays) -> None:
        if files.root in path.parents:
            path.write_bytes(b"half")
            raise OSError(28, "No space left on device")
        write_index(path, subject, arrays)

    monkeypatch.setattr(index_module, "_write", full)
    build = Builder()
    assert opened(place, files, build).path.parent == tmp_path / "cache" / "index"
    assert build.num_calls == 1
    assert index_paths(files.root / ".closeranks-index") == []


def test_a_place_that_does_not_keep_what_is_written_is_not_used(
    files: FolderFiles, tmp_path: Path, place: IndexLocation, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lossy(path: Path, subject: IndexKey, arrays: Arrays) -> None:
        write_index(path, subject, arrays)
        if files.root in path.parents:
            content = bytearray(path.read_bytes())
            content[0] ^= 1
            path.write_bytes(content)

    monkeypatch.setattr(index_module, "_write", lossy)
    build = Builder()
    assert opened(place, files, build).path.parent == tmp_path / "cache" / "index"
    assert build.num_calls == 1
    assert index_paths(files.root / ".closeranks-index") == []


def test_no_room_anywhere_is_one_sentence(
    files: FolderFiles, place: IndexLocation, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, subject: IndexKey, arrays: Arrays) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(index_module, "_write", full)
    build = Builder()
    with pytest.raises(DataError, match=r"closeranks-index' \(No space left on device\) nor in .*cache/index'"):
        opened(place, files, build)
    assert build.num_calls == 1


def test_an_index_of_nothing_is_one_too(files: FolderFiles, place: IndexLocation) -> None:
    calls = []

    def build(progress: Progress) -> Arrays:
        calls.append(1)
        return {}

    assert [*opened(place, files, build)] == [*opened(place, files, build)] == []
    assert len(calls) == 1


def test_every_flipped_bit_is_found_or_harmless(files: FolderFiles, place: IndexLocation) -> None:
    path = opened(place, files, Builder()).path
    sound = path.read_bytes()
    draw = random.Random(5)
    for _ in range(120):
        bit = draw.randrange(8 * len(sound))
        damaged = bytearray(sound)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        build = Builder()
        index = opened(place, files, build)
        np.testing.assert_array_equal(index["offsets"], np.arange(100) * 7)
        np.testing.assert_array_equal(index["sizes"], np.ones(100))
        if build.num_calls == 0:
            assert sound[bit // 8] == 0, "only padding may be damaged unseen"


@pytest.mark.parametrize("keep", [0, 7, 12, 100, -64, -1])
def test_a_torn_index_is_built_again(files: FolderFiles, place: IndexLocation, keep: int) -> None:
    path = opened(place, files, Builder()).path
    path.write_bytes(path.read_bytes()[:keep])
    build = Builder()
    opened(place, files, build)
    assert build.num_calls == 1


def test_more_than_was_written_is_built_again(files: FolderFiles, place: IndexLocation) -> None:
    path = opened(place, files, Builder()).path
    path.write_bytes(path.read_bytes() + b"x")
    build = Builder()
    opened(place, files, build)
    assert build.num_calls == 1


def test_the_ends_of_large_arrays_are_checked_on_opening(files: FolderFiles, place: IndexLocation) -> None:
    build = Builder(3_000_000)
    path = opened(place, files, build).path
    sound = path.read_bytes()
    assert len(sound) > index_file.FULL_CHECK_BYTES
    for at in (-1, -12_000_000 - 64, -36_000_000):
        damaged = bytearray(sound)
        damaged[at] ^= 4
        path.write_bytes(damaged)
        before = build.num_calls
        opened(place, files, build)
        assert build.num_calls == before + 1


def test_a_full_check_finds_what_opening_does_not_look_at(
    files: FolderFiles, place: IndexLocation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_file, "NUM_DRAWN", 0)
    build = Builder(3_000_000)
    index = opened(place, files, build)
    index.check()
    damaged = bytearray(index.path.read_bytes())
    damaged[10_000_000] ^= 1
    index.path.write_bytes(damaged)
    again = opened(place, files, build)
    assert build.num_calls == 1, "this damage lies outside the blocks looked at"
    with pytest.raises(DataError, match=r"bytes \d+ to \d+ do not match their checksum.*built again"):
        again.check()


def test_opening_a_large_index_takes_no_time(files: FolderFiles, place: IndexLocation) -> None:
    build = Builder(10_000_000)
    opened(place, files, build)
    took = []
    for _ in range(5):
        started = time.process_time()
        opened(place, files, build)
        took.append(time.process_time() - started)
    assert build.num_calls == 1
    assert min(took) < 0.05


def _open_in_process(root: Path, place: IndexLocation, started: object, told: object) -> None:
    def build(progress: Progress) -> Arrays:
        told.put(os.getpid())  # type: ignore[attr-defined]
        return Builder()(progress)

    started.wait()  # type: ignore[attr-defined]
    index = opened(place, FolderFiles(root), build)
    assert index["offsets"][99] == 693


@pytest.mark.world
def test_one_process_builds_for_all(files: FolderFiles, place: IndexLocation) -> None:
    barrier, told = FORK.Barrier(4), FORK.Queue()
    processes = [FORK.Process(target=_open_in_process, args=(files.root, place, barrier, told)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0] * 4
    told.get(timeout=60)
    assert told.empty()


def _die_while_writing(root: Path, place: IndexLocation, at: str) -> None:
    def die(*_args: object, **_more: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(index_module, *{"build": ("_built", die), "written": ("_read", _die_on_aside)}[at])
    opened(place, FolderFiles(root), Builder())


def _die_on_aside(path: Path, subject: IndexKey, **more: bool) -> MappedIndex:
    if path.name.endswith(".aside"):
        os.kill(os.getpid(), signal.SIGKILL)
    return read_index(path, subject, **more)


@pytest.mark.world
@pytest.mark.parametrize("at", ["build", "written"])
def test_a_killed_builder_leaves_nothing_that_counts(files: FolderFiles, place: IndexLocation, at: str) -> None:
    process = FORK.Process(target=_die_while_writing, args=(files.root, place, at))
    process.start()
    process.join(30)
    assert process.exitcode == -signal.SIGKILL
    left = index_paths(files.root / ".closeranks-index")
    assert len(left) == (at == "written")
    build = Builder()
    index = opened(place, files, build)
    assert build.num_calls == 1
    assert index_paths(files.root / ".closeranks-index") == [index.path], "what the dead one left is swept"


def test_waiting_ends_when_the_builder_is_stuck(files: FolderFiles, place: IndexLocation) -> None:
    building, may_end = threading.Event(), threading.Event()

    def stuck(progress: Progress) -> Arrays:
        building.set()
        may_end.wait(30)
        return Builder()(progress)

    thread = threading.Thread(target=opened, args=(place, files, stuck))
    thread.start()
    building.wait(30)
    hurried = IndexLocation(cache=place.cache, timeout_s=0.2)
    try:
        with pytest.raises(DataError, match=rf"process {os.getpid()} on .* no progress"):
            opened(hurried, files, Builder())
    finally:
        may_end.set()
        thread.join(30)
    untouched = Builder()
    opened(hurried, files, untouched)
    assert untouched.num_calls == 0


def test_a_builder_that_makes_progress_is_waited_for(
    files: FolderFiles, place: IndexLocation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_module, "_NOTE_EVERY_S", 0.0)
    building = threading.Event()

    def slow(progress: Progress) -> Arrays:
        building.set()
        until = time.monotonic() + 3.0
        done = 0
        while time.monotonic() < until:
            progress(done := done + 1, 10**9)
        return Builder()(progress)

    thread = threading.Thread(target=opened, args=(place, files, slow))
    thread.start()
    building.wait(30)
    untouched = Builder()
    opened(IndexLocation(cache=place.cache, timeout_s=1.5), files, untouched)  # less than the building takes
    thread.join(30)
    assert untouched.num_calls == 0


def test_long_builds_are_told_of(
    files: FolderFiles, place: IndexLocation, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(index_module, "_QUIET_S", 0.0)
    with caplog.at_level(logging.WARNING):
        opened(place, files, Builder())
    assert f"indexing {files.root}: 50% of" in caplog.text


def test_trouble_with_the_data_is_not_blamed_on_the_index(files: FolderFiles, place: IndexLocation) -> None:
    def build(progress: Progress) -> Arrays:
        raise OSError(5, "Input/output error", "a.bin")

    with pytest.raises(DataError, match=r"cannot be indexed: .*Input/output error"):
        opened(place, files, build)


def test_objects_are_not_saved(files: FolderFiles, place: IndexLocation) -> None:
    with pytest.raises(TypeError, match="holds objects"):
        opened(place, files, lambda progress: {"x": np.array([{}], dtype=object)})


@given(
    arrays=st.dictionaries(
        st.text(min_size=1, max_size=5),
        hnp.arrays(
            st.sampled_from([np.int64, np.uint8, np.uint16, np.float32]),
            hnp.array_shapes(min_dims=0, max_dims=3, min_side=0),
        ),
        max_size=4,
    )
)
def test_what_is_written_is_read(arrays: Arrays, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("index") / "it"
    subject = IndexKey("any", {"a": 1}, [])
    write_index(path, subject, arrays)
    index = read_index(path, subject, in_full=True)
    assert [*index] == [*arrays]
    for name, array in arrays.items():
        assert index[name].dtype == array.dtype
        np.testing.assert_array_equal(index[name], array)
    with pytest.raises(UnsoundIndex, match="other files"):
        read_index(path, IndexKey("any", {"a": 2}, []))
