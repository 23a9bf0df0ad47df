"""The last page of a run, on a disk without room and on one that nobody may write to."""

from __future__ import annotations

from pathlib import Path

from closeranks.core.events import RunEnded, RunStarted
from closeranks.telemetry.folder import RunFolder
from closeranks.telemetry.pages import write_pages
from closeranks.telemetry.recorder import Recorder
from tests.checkpoint.test_write_faults import run, tmpfs

from .conftest import step
from .full import fill, needs_root


def record(folder: Path) -> None:
    recorder = Recorder(folder, 0)
    recorder.emit(RunStarted(last_step=3))
    for number in (1, 2, 3):
        recorder.emit(step(number))
    recorder.emit(RunEnded(3, "finished", 1.0))
    recorder.close()


def test_where_there_is_room_it_says_where_they_are(tmp_path: Path) -> None:
    record(tmp_path)
    assert write_pages(tmp_path) == f"report: {tmp_path / 'report.md'}"
    assert RunFolder(tmp_path).picture.exists()


@needs_root
def test_a_full_disk_is_one_sentence_and_leaves_nothing_behind(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "disk", "256k") as place:
        record(place)
        filler = fill(place)
        told = write_pages(place)
        assert told.startswith("no report was written (No space left on device)")
        assert f"`closeranks report {place}`" in told
        assert sorted(path.name for path in place.iterdir()) == ["filler", "metrics"]
        filler.unlink()
        filler.write_bytes(bytes(240 << 10))  # for a page, and for no picture
        assert write_pages(place) == f"report: {place / 'report.md'}, without its picture (No space left on device)"


@needs_root
def test_a_folder_that_may_only_be_read_is_one_sentence(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "disk", "1m") as place:
        record(place)
        run("mount", "-o", "remount,ro", place)
        assert write_pages(place).startswith("no report was written (Read-only file system)")


def test_a_folder_that_was_removed_is_one_sentence(tmp_path: Path) -> None:
    assert write_pages(tmp_path / "gone").startswith("no report was written (No such file or directory)")
