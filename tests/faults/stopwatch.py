"""A stopwatch inside each worker, which knows nothing of our telemetry: when its first step began, when each step was
done."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from closeranks import Hook, Session
from closeranks.core.events import StepDone
from closeranks.run.components.component import Component


class _FirstStep(Component):
    """Tells when the first step of a session begins."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write, self._is_first = write, True

    def begin(self, index: int) -> None:
        if self._is_first:
            self._is_first = False
            self._write(f"begin {index}")


class Stopwatch(Hook):
    def __init__(self) -> None:
        self._file: int | None = None

    def on_start(self, session: Session) -> None:
        path = session.folder / f"stopwatch-{session.world.rank}"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        session.engine.components.add(_FirstStep(self._write))

    def on_step(self, session: Session, step: StepDone) -> None:
        self._write(f"step {step.step}")

    def _write(self, words: str) -> None:
        assert self._file is not None
        os.write(self._file, f"{words} {time.monotonic()}\n".encode())


def time_that_counts(folder: Path) -> float:
    """Seconds of all ranks in steps that were finished and not redone, from the end of the step before."""
    return sum(_of_rank(path.read_text().splitlines()) for path in folder.glob("stopwatch-*"))


def _of_rank(lines: Iterable[str]) -> float:
    spent: dict[int, float] = {}
    before = 0.0
    for line in lines:
        what, number, at = line.split()
        if what == "begin":
            spent = {step: seconds for step, seconds in spent.items() if step <= int(number)}
        else:
            spent[int(number)] = float(at) - before
        before = float(at)
    return sum(spent.values())
