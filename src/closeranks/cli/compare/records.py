"""What stays of a run that is over? A folder with the run itself, what it printed, and how it ended.

    COMPARISON/runs/SETTING-seed0-1f3a9c20/run/          the run folder
                                           output.txt    what `closeranks train` printed
                                           done.json     how it ended; without it the run does not count

Invariant: ``done.json`` is there whole or not at all.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from closeranks.cli.compare.plan import Plan, Run


@dataclass(frozen=True, slots=True)
class Record:
    """How a run went, beside what its own folder tells."""

    exit_code: int
    wall_s: float
    is_stopped: bool = False
    """The budget of seconds was used up."""
    traffic: tuple[tuple[float, int], ...] = ()
    """(wall clock, bytes sent until then), as the interfaces counted; empty where nobody counted."""
    said: str = ""
    """Its last words."""


class Slot:
    """The folder of one run."""

    def __init__(self, plan: Plan, run: Run) -> None:
        self.path = plan.folder / "runs" / run.name
        self.folder = self.path / "run"
        self.output = self.path / "output.txt"
        self._done = self.path / "done.json"

    def read(self) -> Record | None:
        """How the run went; None where it was not finished."""
        try:
            told = json.loads(self._done.read_text())
        except (OSError, ValueError):
            return None
        return Record(**{**told, "traffic": tuple((float(at), int(sent)) for at, sent in told["traffic"])})

    def write(self, record: Record) -> None:
        unfinished = self._done.with_suffix(".part")
        unfinished.write_text(json.dumps(asdict(record)) + "\n")
        unfinished.replace(self._done)

    def clear(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir(parents=True)


def last_words(output: str) -> str:
    """What ``closeranks`` said as it ended, or the last line of whoever said something."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    told = [place for place, line in enumerate(lines) if line.startswith("closeranks: ")]
    if told:
        return " ".join(lines[told[-1] :][:3]).removeprefix("closeranks: ")
    return lines[-1] if lines else ""


def failed_runs(plan: Plan) -> Sequence[Slot]:
    """Runs that are over and did not end well; whoever clears them lets them run again."""
    slots = [Slot(plan, run) for run in plan.runs]
    return [slot for slot in slots if (record := slot.read()) and record.exit_code and not record.is_stopped]
