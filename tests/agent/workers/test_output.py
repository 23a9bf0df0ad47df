"""What is printed: logs, lines, last words."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from closeranks.agent.workers.output import LineAssembler, OutputLog, log_excerpt


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_progress_bar_is_shown_now_and_then_and_as_it_ended() -> None:
    clock = Clock()
    lines = LineAssembler(clock)
    assert lines.feed(b"\r  0%") == []
    assert lines.feed(b"\r 10%") == ["  0%"], "the first state that is whole"
    assert lines.feed(b"\r 20%\r 30") == []
    clock.now += 60.0
    assert lines.feed(b"%\r 40%") == [" 30%"]
    assert lines.feed(b"\r100%\nand on\r\n") == ["100%", "and on"]
    assert lines.feed(b"done\r") == []
    assert lines.finish() == ["done"]


def test_a_line_that_does_not_end_is_shown_in_pieces() -> None:
    lines = LineAssembler()
    shown = [line for _ in range(100) for line in lines.feed(b"x" * 10_000)] + lines.finish()
    assert sum(map(len, shown)) == 1_000_000
    assert max(map(len, shown)) == 8192


@pytest.mark.parametrize("piece", [b"\r", b"\r" + b"a progress bar" * 10, b"x"], ids=["returns", "bar", "no end"])
def test_a_line_without_end_is_kept_in_bounds(piece: bytes) -> None:
    """The whole line was kept, and looked through again at every read."""
    lines = LineAssembler()
    chunk = (piece * (16384 // len(piece) + 1))[:16384]
    for _ in range(200):
        lines.feed(chunk)
        assert len(lines._rest) <= 8192


def test_a_child_that_prints_for_ever_does_not_hold_up_the_end(tmp_path: Path) -> None:
    """It has inherited the worker's pipe; what it prints after the worker's death is nobody's last words."""
    texts: list[str] = []

    def print_more(text: str) -> None:
        texts.append(text)
        if len(texts) < 1000:
            os.write(writer, b"more\n" * 100)

    log = OutputLog(tmp_path / "log", print_more, lambda note: None)
    writer = log.take_writer()
    os.write(writer, b"one\n")
    log.finish()
    assert texts == ["one"]
    assert (tmp_path / "log").read_text() == "one\n"
    texts += [""] * 1000
    os.close(writer)
    log.close()


def test_a_process_that_spends_its_time_printing_is_known(tmp_path: Path) -> None:
    log = OutputLog(tmp_path / "log", lambda text: None, lambda note: None)
    writer = log.take_writer()
    for _ in range(100):
        os.write(writer, b"a few lines, as a thread prints them while its process is stuck\n")
        log.read()
    assert log.printing_at == 0.0
    for _ in range(15):
        os.write(writer, b"x" * 3000)  # no two of them share a page: full with less than its size
    waiting_at = log.printing_at
    assert waiting_at > 0.0
    log.drain()
    last = log.printing_at
    assert log.printing_at == last, "not any more"
    for _ in range(100):
        os.write(writer, b"x" * 1000)
        log.read()
    assert log.printing_at > last, "much has passed through a pipe that was never full"
    os.close(writer)
    log.close()


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
    assert log_excerpt(lines, 7) == ("5", "6", "7", "8", "Fatal Python error: Segmentation fault", "frame 0", "frame 1")
    assert log_excerpt(["only"], 7) == ("only",)
