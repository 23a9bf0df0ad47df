"""The last page of a run, on a disk without room and on one that nobody may write to."""

from __future__ import annotations

import threading
from pathlib import Path

from closeranks.core.events import RunEnded, RunStarted
from closeranks.telemetry.reports.pages import write_pages
from closeranks.telemetry.run_log.recorder import EventRecorder
from closeranks.telemetry.run_log.run_folder import RunFolder
from tests.checkpoint.test_write_faults import run, tmpfs
from tests.telemetry.conftest import step
from tests.telemetry.full import fill, needs_root


def record(folder: Path) -> None:
    recorder = EventRecorder(folder, 0)
    recorder.emit(RunStarted(last_step=3))
    for number in (1, 2, 3):
        recorder.emit(step(number))
    recorder.emit(RunEnded(3, "finished", 1.0))
    recorder.close()


def pages_of(folder: Path) -> list[str]:
    told: list[str] = []
    write_pages(folder, told.append)
    return told


def test_a_script_need_not_wait_for_its_picture(tmp_path: Path) -> None:
    record(tmp_path)
    others = {*threading.enumerate()}  # runs of other tests may still draw theirs
    write_pages(tmp_path, lambda text: None, in_thread=True)
    new = {*threading.enumerate()} - others
    (drawing,) = [thread for thread in new if thread.name == "closeranks-picture"] or [None]
    if drawing is not None:
        assert not drawing.daemon, "the interpreter waits for it when it ends"
        drawing.join()
    assert "](curve.png)" in (tmp_path / "report.md").read_text()


def test_where_there_is_room_it_says_where_they_are(tmp_path: Path) -> None:
    record(tmp_path)
    seen: list[tuple[str, bool]] = []
    write_pages(tmp_path, lambda text: seen.append((text, RunFolder(tmp_path).plot.exists())))
    assert seen == [(f"report: {tmp_path / 'report.md'}", False)], "said before the picture is drawn"
    assert "](curve.png)" in (tmp_path / "report.md").read_text()
    assert RunFolder(tmp_path).plot.exists()


@needs_root
def test_a_full_disk_is_one_sentence_and_leaves_nothing_behind(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "disk", "256k") as place:
        record(place)
        filler = fill(place)
        (told,) = pages_of(place)
        assert told.startswith("no report was written (No space left on device)")
        assert f"`closeranks report {place}`" in told
        assert sorted(path.name for path in place.iterdir()) == ["filler", "metrics"]
        filler.unlink()
        filler.write_bytes(bytes(240 << 10))  # for a page, and for no picture
        assert pages_of(place) == [
            f"report: {place / 'report.md'}",
            "The report has no picture (No space left on device).",
        ]


@needs_root
def test_a_folder_that_may_only_be_read_is_one_sentence(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "disk", "1m") as place:
        record(place)
        run("mount", "-o", "remount,ro", place)
        assert pages_of(place)[0].startswith("no report was written (Read-only file system)")


def test_a_folder_that_was_removed_is_one_sentence(tmp_path: Path) -> None:
    assert pages_of(tmp_path / "gone")[0].startswith("no report was written (No such file or directory)")
