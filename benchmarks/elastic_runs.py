"""How is a job started for a benchmark of faults, watched from outside and ended?

By the commands that people use, in a folder of its own. Invariant: whatever happens inside ``with``, no process of the
job is left when it is over.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ROOT = Path(__file__).resolve().parent.parent
POLL_S = 0.002
PATIENCE_S = 120.0
_END_S = 10.0


class LaneFailed(Exception):
    """A run ended, or never came to what was waited for; the text has its last words."""


class Launched:
    """A command and all it starts."""

    def __init__(self, command: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._log = folder / "printed.log"
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, *command],
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_for(self, what: str, is_done: Callable[[], Any], patience_s: float = PATIENCE_S) -> float:
        """When it was so (``time.monotonic()``)."""
        deadline = time.monotonic() + patience_s
        while not is_done():
            if self._process.poll() is not None:
                raise LaneFailed(f"it ended while {what} was waited for:\n{self._log_tail()}")
            if time.monotonic() > deadline:
                raise LaneFailed(f"{what} did not come within {patience_s:g} s:\n{self._log_tail()}")
            time.sleep(POLL_S)
        return time.monotonic()

    def end(self) -> int:
        """Its status when it ends by itself."""
        return self._process.wait(PATIENCE_S)

    def _log_tail(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-20:])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        below = descendants(self.pid)
        for pid in (self.pid, *below):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self._process.wait()
        deadline = time.monotonic() + _END_S
        while any(Path(f"/proc/{pid}/exe").exists() for pid in below) and time.monotonic() < deadline:
            time.sleep(POLL_S)


class Ours(Launched):
    """``closeranks train`` on this machine."""

    def __init__(self, folder: Path, num_workers: int, overrides: Sequence[str]) -> None:
        quiet = ["telemetry.report=false", "telemetry.log_every=1000000", "checkpoint.save=false"]
        job = ["examples/tiny.toml", "-n", str(num_workers), f"run.folder={folder / 'run'}", "train.eval_every=0"]
        super().__init__(["-m", "closeranks", "train", *job, *quiet, *overrides], folder)
        self.run = folder / "run"

    def events(self, name: str, who: str = "rank-00000") -> list[dict[str, Any]]:
        """What was recorded so far, whole lines alone."""
        return [line for line in lines_of(self.run / "metrics" / f"{who}.jsonl") if line.get("event") == name]

    @property
    def num_done(self) -> int:
        return max((int(event["step"]) for event in self.events("step")), default=0)

    @property
    def is_warm(self) -> bool:
        """Whether the process that workers are forked from has learned what it will."""
        log = self.run / "logs" / "zygote.log"
        return log.exists() and "warmed up" in log.read_text()

    def workers(self) -> list[int]:
        """Their process numbers, in the order of their birth: by rank. A zygote's spare leads a session of its own."""
        return sorted(pid for zygote in zygotes(self.pid) for pid in children(zygote) if not _leads(pid))


def _leads(pid: int) -> bool:
    try:
        return os.getsid(pid) == pid
    except ProcessLookupError:
        return False


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Whole lines of JSON; the last one may still be on its way."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def children(pid: int) -> list[int]:
    try:
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def descendants(pid: int) -> list[int]:
    found = children(pid)
    return [*found, *(one for child in found for one in descendants(child))]


def zygotes(agent: int) -> list[int]:
    """The processes that an agent forks workers from, by the short name that ``top`` shows."""
    return [pid for pid in children(agent) if _short_name(pid) == "cr-zygote"]


def _short_name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except FileNotFoundError:
        return ""


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except FileNotFoundError:
        return ""
