"""Files that are appended to while their disk fails: nothing raises, trouble is told once, no line is torn."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from closeranks.core.system import append_file
from closeranks.core.system.append_file import AppendFile
from tests.checkpoint.test_write_faults import run, tmpfs
from tests.telemetry.full import fill, needs_root

LINE = b'{"step": 1234567, "loss": 0.125}\n'


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(append_file, "RETRY_S", 0.0)


class Told:
    def __init__(self) -> None:
        self.lost: list[str] = []
        self.back: list[int] = []

    def open(self, path: Path, **how: bool) -> AppendFile:
        return AppendFile(path, self.lost.append, self.back.append, **how)


@needs_root
def test_a_full_disk_tears_no_line_and_loses_none(tmp_path: Path) -> None:
    told = Told()
    with tmpfs(tmp_path / "disk", "64k") as place:
        file = told.open(place / "lines")
        file.write(LINE)
        filler = fill(place)
        for _ in range(500):  # the rest of its first block takes some, the last of them in part
            file.write(LINE)
        assert (place / "lines").stat().st_size % len(LINE), "a line was cut"
        assert told.lost == ["No space left on device"]
        assert told.back == []
        filler.unlink()
        file.write(LINE)
        file.close()
        assert (place / "lines").read_bytes() == LINE * 502
        assert (told.lost, told.back) == (["No space left on device"], [0])


@needs_root
def test_what_is_opened_on_a_full_disk_is_written_later_and_ends_a_torn_line_first(tmp_path: Path) -> None:
    told = Told()
    with tmpfs(tmp_path / "disk", "64k") as place:
        (place / "lines").write_bytes(b"x" * 4096)
        filler = fill(place)
        file = told.open(place / "lines")
        file.write(LINE)
        assert told.lost == ["No space left on device"]
        filler.unlink()
        file.write(LINE)
        file.close()
        assert (place / "lines").read_bytes() == b"x" * 4096 + b"\n" + LINE * 2


@needs_root
def test_of_what_cannot_be_held_the_oldest_is_dropped_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(append_file, "HELD_BYTES", 10 * len(LINE))
    told = Told()
    with tmpfs(tmp_path / "disk", "64k") as place:
        file = told.open(place / "lines")
        file.write(b"a" * 4090)  # what follows is cut at the end of the block, and then dropped
        filler = fill(place)
        for _ in range(100):
            file.write(LINE)
        filler.unlink()
        file.close()
        (num_dropped,) = told.back
        head, *lines = (place / "lines").read_bytes().splitlines(keepends=True)
        assert head == b"a" * 4090 + LINE[:6] + b"\n"
        assert lines == [LINE] * 10
        assert num_dropped == 90 * len(LINE) - 6


def test_a_folder_that_is_removed_is_made_again(tmp_path: Path) -> None:
    told = Told()
    path = tmp_path / "run" / "metrics" / "lines"
    file = told.open(path)
    file.write(LINE)
    shutil.rmtree(tmp_path / "run")
    file.write(LINE)
    file.close()
    assert path.read_bytes() == LINE
    assert told.lost == []


@needs_root
def test_a_place_that_is_read_only_for_a_while(tmp_path: Path) -> None:
    told = Told()
    with tmpfs(tmp_path / "disk", "64k") as place:
        run("mount", "-o", "remount,ro", place)
        with pytest.raises(OSError, match="Read-only"):
            told.open(place / "sub" / "lines", must_open=True)
        file = told.open(place / "sub" / "lines")
        file.write(LINE)
        assert told.lost == ["Read-only file system"]
        run("mount", "-o", "remount,rw", place)
        file.write(LINE)
        assert (place / "sub" / "lines").read_bytes() == LINE * 2
        file.close()
        file.write(LINE)
        assert (place / "sub" / "lines").read_bytes() == LINE * 2, "closed is closed"


def test_a_file_moves_with_what_stands_in_it_to_the_end_of_another(tmp_path: Path) -> None:
    told = Told()
    for name in ("new", "old"):
        file = told.open(tmp_path / "here" / name)
        file.write(LINE)
        if name == "old":
            (tmp_path / "there").mkdir(exist_ok=True)
            (tmp_path / "there" / name).write_bytes(LINE)
        file.move(tmp_path / "there" / name)
        file.write(LINE)
        file.close()
    assert (tmp_path / "there" / "new").read_bytes() == LINE * 2
    assert (tmp_path / "there" / "old").read_bytes() == LINE * 3
    assert list((tmp_path / "here").iterdir()) == []
    assert told.lost == []
