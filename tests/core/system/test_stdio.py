"""Output that nobody reads: dropped where a run must go on, an end where telling was all there was to do."""

from __future__ import annotations

import fcntl
import io
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress

import pytest

from closeranks.core.errors import SetupError
from closeranks.core.system.stdio import StandardStream


class Ends:
    """A pipe; both ends are given back."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()

    def read(self) -> bytes:
        return os.read(self.reader, 1 << 20)

    def leave(self) -> None:
        os.close(self.reader)
        self.reader = -1

    def close(self) -> None:
        for fd in (self.reader, self.writer):
            with suppress(OSError):
                os.close(fd)


@pytest.fixture
def ends() -> Iterator[Ends]:
    ends = Ends()
    yield ends
    ends.close()


def text_of(output: StandardStream) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BufferedWriter(output), write_through=True)


def test_a_reader_that_leaves_is_never_noticed_by_whoever_prints(ends: Ends) -> None:
    text = text_of(StandardStream(ends.writer, required=False))
    text.write("one\n")
    text.flush()
    assert ends.read() == b"one\n"
    ends.leave()
    for _ in range(3):
        print("nobody reads this", file=text, flush=True)
    assert os.readlink(f"/proc/self/fd/{ends.writer}") == os.devnull, "children print nowhere, too"


def test_a_required_reader_that_leaves_ends_the_command(ends: Ends) -> None:
    text = text_of(StandardStream(ends.writer, required=True))
    ends.leave()
    with pytest.raises(BrokenPipeError):
        print("nobody reads this", file=text, flush=True)
    text.flush()


def test_a_full_disk_may_pass() -> None:
    fd = os.open("/dev/full", os.O_WRONLY)
    output = StandardStream(fd, required=False)
    assert output.write(b"lost") == 4
    assert os.readlink(f"/proc/self/fd/{fd}") == "/dev/full", "the next write is tried again"
    with pytest.raises(SetupError, match="cannot be written"):
        StandardStream(fd, required=True).write(b"lost")
    os.close(fd)


def test_a_terminal_that_is_gone_is_like_a_reader_that_left() -> None:
    ours, theirs = os.openpty()
    output = StandardStream(theirs, required=False)
    os.close(ours)
    assert output.write(b"gone") == 4
    assert os.readlink(f"/proc/self/fd/{theirs}") == os.devnull
    os.close(theirs)


@pytest.mark.parametrize("kind", ["pipe", "terminal"])
def test_a_reader_that_does_not_read_holds_nobody_up_for_long(kind: str) -> None:
    """A pager, a stopped terminal, an ssh connection whose other end sleeps: without patience this never returned."""
    reader, writer = os.pipe() if kind == "pipe" else os.openpty()
    output = StandardStream(writer, required=False, timeout_s=0.05)
    for _ in range(200):
        assert output.write(b"x" * 8191 + b"\n") == 8192
    os.set_blocking(reader, False)
    shown = b""
    for _ in range(2):
        with suppress(BlockingIOError):
            while piece := os.read(reader, 1 << 16):
                shown += piece
        output.write(b"read again\n")
    with suppress(BlockingIOError):
        shown += os.read(reader, 1 << 16)
    assert b"bytes were not shown" in shown
    assert shown.rstrip().endswith(b"read again")
    assert not fcntl.fcntl(writer, fcntl.F_GETFL) & os.O_NONBLOCK, "what others share is left as it was"
    os.close(reader)
    os.close(writer)


def test_closed_standard_descriptors_are_opened_before_files_take_their_place() -> None:
    script = (
        "from closeranks.core.system.stdio import ignore_broken_pipes\n"
        "ignore_broken_pipes()\n"
        "import os, sys\n"
        "file = open(sys.argv[1], 'w')\n"
        "assert file.fileno() > 2, file.fileno()\n"
        "print('to nobody'); sys.stdout.flush(); sys.stderr.flush(); os.system('echo also to nobody')\n"
    )
    shell = f'exec {sys.executable} -c "$0" /dev/null <&- >&- 2>&-'
    assert subprocess.run(["bash", "-c", shell, script], timeout=300).returncode == 0
