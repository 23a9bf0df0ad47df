"""On a terminal one live line and everything given back at the end; elsewhere plain lines."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cli.commands import TINY, closeranks, mark, marked_processes

pytestmark = pytest.mark.world

QUICK = [
    *("model.num_layers=2", "model.dim=32", "train.global_batch=6", "train.micro_batch=3"),
    *("train.eval_every=0", "train.eval_samples=6", "telemetry.report=false", "run.folder=run"),
]
HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"
# The command becomes the leader of its own session, with the terminal as its own: the keys then reach it.
TAKE_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
)


class Terminal:
    """A terminal of 110 columns with a command on it."""

    def __init__(self, *arguments: object, cwd: Path) -> None:
        self.marker = mark()
        self._ours, theirs = os.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 110, 0, 0))
        self.settings = termios.tcgetattr(theirs)
        command = [sys.executable, "-m", "closeranks", *map(str, arguments)]
        self.process = subprocess.Popen(
            [sys.executable, "-c", TAKE_TERMINAL, *command],
            cwd=cwd,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm-256color", self.marker: "1"},
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        self._theirs = theirs  # kept, so that its settings can be read when the command is gone
        self.text = ""

    def read(self, until: str = "", timeout_s: float = 300.0) -> str:
        """Up to the first ``until``; without it, up to the command's end."""
        deadline = time.monotonic() + timeout_s
        while not until or until not in self.text:
            ready, _, _ = select.select([self._ours], [], [], 0.1)
            if ready:
                self.text += self._piece()
            elif self.process.poll() is not None:
                break
            assert time.monotonic() < deadline, f"{until!r} did not appear: {self.text!r}"
        assert until in self.text, self.text
        return self.text

    def _piece(self) -> str:
        try:
            return os.read(self._ours, 1 << 16).decode(errors="replace")
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return ""

    def press(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    def is_as_before(self) -> bool:
        return termios.tcgetattr(self._theirs) == self.settings

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)
        os.close(self._theirs)


@contextmanager
def terminal(*arguments: object, cwd: Path) -> Iterator[Terminal]:
    screen = Terminal(*arguments, cwd=cwd)
    try:
        yield screen
    finally:
        screen.close()


def shown(text: str) -> str:
    """What stands on the screen, without the signs that move and colour."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_a_terminal_shows_one_live_line_and_gets_its_cursor_back(tmp_path: Path) -> None:
    with terminal("train", TINY, "-n", 2, "train.steps=30", *QUICK, cwd=tmp_path) as screen:
        text = screen.read()
        assert screen.process.wait(timeout=300) == 0
        assert screen.is_as_before()
    assert text.count(HIDE) == text.count(SHOW) == 1
    assert text.index(HIDE) < text.index(SHOW)
    drawn = re.findall(r"step +(\d+)/30", shown(text))
    assert drawn[0] == "1"
    assert drawn[-1] == "30"
    live = text[text.index(HIDE) : text.index(SHOW)]
    assert live.count("\r") > 2, "the line is drawn over itself"
    assert "━" in live, "with a bar beside it"
    assert max(len(line) for line in re.split(r"[\r\n]+", shown(live)) if "step" in line) < 110
    after = shown(text[text.index(SHOW) :])
    assert "finished at step 30" in after
    assert not marked_processes(screen.marker)


def test_ctrl_c_on_a_terminal_ends_everything_and_says_how_to_go_on(tmp_path: Path) -> None:
    """The terminal sends SIGINT to the workers too: they must leave the ending to the agent."""
    patient = "agent.interrupt_s=120"  # a busy machine may not save within the default
    with terminal("train", TINY, "-n", 2, "train.steps=100000", patient, *QUICK, cwd=tmp_path) as screen:
        screen.read(HIDE)
        screen.press(b"\x03")
        text = screen.read()
        assert screen.process.wait(timeout=300) == 130
        assert screen.is_as_before()
        assert not marked_processes(screen.marker)
    assert text.rindex(SHOW) > text.rindex(HIDE)
    assert "Traceback" not in text
    assert "checkpoint.resume=run" in shown(text)
    assert (tmp_path / "run" / "checkpoints" / "latest").exists()


def test_a_run_that_fails_gives_the_terminal_back(tmp_path: Path) -> None:
    (tmp_path / "own_fails.py").write_text(
        "from closeranks import Hook\n"
        "class Fails(Hook):\n"
        "    def on_step(self, session, step):\n"
        "        if step.step == 5: raise KeyError('lost')\n"
    )
    hook = 'run.hooks=["own_fails:Fails"]'
    with terminal("train", TINY, "-n", 2, "train.steps=100", *QUICK, hook, cwd=tmp_path) as screen:
        text = screen.read()
        assert screen.process.wait(timeout=300) == 2
        assert screen.is_as_before()
    assert text.rindex(SHOW) > text.rindex(HIDE)
    assert "the hook Fails raised in on_step: KeyError: 'lost'" in " ".join(shown(text).split())


def test_elsewhere_there_are_plain_lines(tmp_path: Path) -> None:
    done = closeranks("train", TINY, "-n", 1, "train.steps=20", *QUICK, cwd=tmp_path)
    assert done.code == 0, done.err
    assert "\x1b" not in done.out + done.err
    assert "\r" not in done.out
    assert re.findall(r"^step +(\d+)/20 ", done.out, re.MULTILINE) == ["1", "10", "20"]
