"""What ps shows, and what it must not lose by that."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import os, subprocess, sys
from pathlib import Path
from closeranks.core.system.process_title import set_child_title, set_title
if len(sys.argv) > 1:
    set_child_title("writer", os.getppid())
else:
    set_title("rank 3 of 8", "runs/demo", short="cr-rank-3")
print(Path("/proc/self/cmdline").read_bytes().rstrip(b"\\0").decode(), flush=True)
print(Path("/proc/self/comm").read_text().strip(), flush=True)
assert b"MARK_OF_A_JOB=1" in Path("/proc/self/environ").read_bytes(), "tools find processes of a job by it"
assert "SPT_NOENV" not in os.environ
if len(sys.argv) == 1:
    subprocess.run([sys.executable, "-c", sys.orig_argv[-1], "child"], check=True)
"""


def test_rank_and_run_are_shown_and_the_environment_stays_readable() -> None:
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, env={"MARK_OF_A_JOB": "1"}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "closeranks: rank 3 of 8, runs/demo",
        "cr-rank-3",
        "closeranks: writer, rank 3 of 8, runs/demo",
        "cr-writer",
    ]
