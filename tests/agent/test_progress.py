"""The progress word, also of a process that was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from closeranks.agent.progress import PHASE_WORDS, Phase, Progress, ProgressWord, create_progress


def test_a_fresh_word_is_at_no_step() -> None:
    fd = create_progress()
    word = ProgressWord(fd)
    os.close(fd)
    assert (word.read().step, word.read().phase) == (None, Phase.START)
    before = time.monotonic()
    word.write(2**40, Phase.SAVE)
    progress = word.read()
    assert progress == Progress(2**40, Phase.SAVE, progress.at)
    assert before - 1e-6 <= progress.at <= time.monotonic()
    word.close()


def test_the_last_words_of_a_killed_process_can_be_read() -> None:
    fd = create_progress()
    code = (
        "import os, sys; from closeranks.agent.progress import ProgressWord;"
        "ProgressWord(int(sys.argv[1])).write(41, 3); os.kill(os.getpid(), 9)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(fd)], pass_fds=(fd,))
    assert process.wait() == -signal.SIGKILL
    word = ProgressWord(fd)
    assert (word.read().step, word.read().phase) == (41, Phase.REDUCE)
    word.close()
    os.close(fd)


def test_a_foreign_descriptor_is_refused() -> None:
    fd = os.memfd_create("foreign")
    os.ftruncate(fd, 64)
    with pytest.raises(ValueError, match="not a progress word"):
        ProgressWord(fd)
    os.close(fd)


def test_every_phase_has_words() -> None:
    assert set(PHASE_WORDS) == set(Phase)
