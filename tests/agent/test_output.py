"""What is printed: logs, lines, last words."""

from __future__ import annotations

import os
from pathlib import Path

from closeranks.agent.output import OutputLog, last_words


def test_lines_and_log_hold_the_same_and_a_character_may_be_cut_in_two(tmp_path: Path) -> None:
    lines: list[str] = []
    log = OutputLog(tmp_path / "log", lines.append, lines.append)
    writer = log.take_writer()
    text = "grüß dich\nund \xff weiter\nohne Ende"
    data = text.encode().replace("\xff".encode(), b"\xff")
    for index in range(len(data)):
        os.write(writer, data[index : index + 1])
        assert log.read()
    assert not log.read()
    assert log.is_open
    os.close(writer)
    log.close()
    assert lines == ["grüß dich", "und � weiter", "ohne Ende"]
    assert (tmp_path / "log").read_bytes() == data


def test_the_tail_is_of_this_run_alone(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("an earlier run's\n")
    log = OutputLog(tmp_path / "log", lambda line: None, lambda note: None)
    assert log.tail(3) == ()
    writer = log.take_writer()
    os.write(writer, b"one\n\n  \ntwo\nthree\nfour\n")
    os.close(writer)
    log.read()
    assert log.tail(3) == ("two", "three", "four")
    log.close()
    assert (tmp_path / "log").read_text().startswith("an earlier run's\none\n")


def test_what_is_added_stands_in_the_log_after_what_was_printed(tmp_path: Path) -> None:
    lines: list[str] = []
    log = OutputLog(tmp_path / "log", lines.append, lines.append)
    writer = log.take_writer()
    os.write(writer, b"printed\n")
    log.add("a traceback\n")
    os.close(writer)
    log.close()
    assert (tmp_path / "log").read_text() == "printed\na traceback\n"
    assert lines == ["printed"]


def test_a_full_disk_is_said_once_and_lines_go_on(tmp_path: Path) -> None:
    lines: list[str] = []
    notes: list[str] = []
    os.symlink("/dev/full", tmp_path / "log")
    log = OutputLog(tmp_path / "log", lines.append, notes.append)
    writer = log.take_writer()
    for text in (b"one\n", b"two\n"):
        os.write(writer, text)
        log.read()
    os.close(writer)
    log.close()
    assert lines == ["one", "two"]
    assert len(notes) == 1
    assert "No space left on device" in notes[0]


def test_a_writer_that_was_never_taken_is_closed_too(tmp_path: Path) -> None:
    log = OutputLog(tmp_path / "log", lambda line: None, lambda note: None)
    log.close()
    assert (tmp_path / "log").read_bytes() == b""


def test_of_a_crash_the_innermost_calls_are_shown() -> None:
    lines = [*map(str, range(9)), "Fatal Python error: Segmentation fault", *(f"frame {i}" for i in range(30))]
    assert last_words(lines, 7) == ("5", "6", "7", "8", "Fatal Python error: Segmentation fault", "frame 0", "frame 1")
    assert last_words(["only"], 7) == ("only",)
