"""Run the command line as a person does, and look for what it left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
TINY = str(ROOT / "examples" / "tiny.toml")
IMPORTABLE = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
"""Where a job finds hooks that tests define."""
FAST = ["train.steps=4", "model.num_layers=2", "train.eval_every=0", "train.eval_samples=6", "telemetry.report=false"]


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str
    seconds: float
    left_behind: list[str]


def mark() -> str:
    return f"CLOSERANKS_TEST_MARK_{uuid.uuid4().hex}"


def marked_processes(name: str) -> list[str]:
    """Live processes that carry the marker in their environment: everything a command started, however far removed."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        try:
            if name.encode() in (entry / "environ").read_bytes():
                found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return found


def closeranks(*arguments: object, cwd: Path, timeout_s: float = 300.0, env: dict[str, str] | None = None) -> Done:
    name, started_at = mark(), time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "closeranks", *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", name: "1", **(env or {})},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    seconds = time.monotonic() - started_at
    return Done(done.returncode, done.stdout, done.stderr, seconds, marked_processes(name))


@contextmanager
def started(
    *arguments: object, cwd: Path, env: dict[str, str] | None = None
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A command that runs on while the test does something to it."""
    name = mark()
    process = subprocess.Popen(
        [sys.executable, "-m", "closeranks", *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", name: "1", **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process, name
    finally:
        process.kill()
        process.communicate()


def wait_for_line(process: subprocess.Popen[str], text: str) -> str:
    """Read the command's output up to a line that holds ``text``."""
    assert process.stdout is not None
    for line in process.stdout:
        if text in line:
            return line
    raise AssertionError(f"the command ended before it said {text!r}: {process.communicate()}")
