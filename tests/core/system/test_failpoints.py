"""Points at which a process dies by order: one order, one life, and none without."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

PASSES = (
    "from closeranks.core.system.failpoints import failpoint\nfailpoint('first')\nfailpoint('second')\nprint('alive')"
)


def _pass(**environ: str) -> int:
    return subprocess.run(
        [sys.executable, "-c", PASSES], env={**os.environ, **environ}, stdout=subprocess.DEVNULL
    ).returncode


def test_nobody_dies_who_was_not_asked_to(tmp_path: Path) -> None:
    assert _pass() == 0
    assert _pass(CLOSERANKS_KILL_IN=str(tmp_path)) == 0
    assert _pass(CLOSERANKS_KILL_IN=str(tmp_path / "gone"), CLOSERANKS_KILL_AT="third") == 0


def test_one_order_costs_one_life(tmp_path: Path) -> None:
    (tmp_path / "second").touch()
    (tmp_path / "third").touch()
    assert _pass(CLOSERANKS_KILL_IN=str(tmp_path)) == -signal.SIGKILL
    assert [path.name for path in tmp_path.iterdir()] == ["third"]
    assert _pass(CLOSERANKS_KILL_IN=str(tmp_path)) == 0


def test_a_label_costs_every_life() -> None:
    assert [_pass(CLOSERANKS_KILL_AT="second") for _ in range(2)] == [-signal.SIGKILL] * 2
    assert _pass(CLOSERANKS_KILL_AT="second:2") == 0
