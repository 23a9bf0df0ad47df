"""The record of a run that has ended: a folder with the run itself, its output, and how it ended.

    COMPARISON/.owner                                    held while a comparison runs there
               runs/SETTING-seed0-1f3a9c20/run/          the run folder
                                           output.txt    what `closeranks train` printed
                                           done.json     how it ended; without it the run does not count

Invariants: ``done.json`` is complete or absent; only one comparison at a time writes to a folder; a folder that cannot
be written is reported in one sentence.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import IO

from closeranks.core.errors import SetupError
from closeranks.core.system.regular_file import read_text
from closeranks.lab.compare.comparison_plan import ComparisonPlan, ComparisonRun
from closeranks.telemetry.formatting import count


@dataclass(frozen=True, slots=True)
class MachineInfo:
    """What the times of a run depend on besides the job."""

    host: str = ""
    num_cores: int = 0
    torch: str = ""

    @classmethod
    def here(cls) -> MachineInfo:
        """This machine; does not import torch."""
        try:
            torch = metadata.version("torch")
        except metadata.PackageNotFoundError:
            torch = ""
        return cls(socket.gethostname(), len(os.sched_getaffinity(0)), torch)

    def __str__(self) -> str:
        return f"{self.host} with {self.num_cores} cores and torch {self.torch}" if self.host else ""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """How a run went, in addition to what its run folder records."""

    exit_code: int
    wall_s: float
    is_stopped: bool = False
    """The budget of seconds was used up."""
    traffic: tuple[tuple[float, int], ...] = ()
    """(wall clock, bytes sent until then), as counted at the interfaces; empty if not counted."""
    said: str = ""
    """The end of its output (``last_output``)."""
    machine: MachineInfo = MachineInfo()


class ComparisonRunFolder:
    """The folder of one run."""

    def __init__(self, plan: ComparisonPlan, run: ComparisonRun) -> None:
        self.path = plan.folder / "runs" / run.name
        self.folder = self.path / "run"
        self.output = self.path / "output.txt"
        self._done = self.path / "done.json"

    def read(self) -> RunRecord | None:
        """How the run went; None if it has not finished, or was recorded by an incompatible version."""
        try:
            fields = json.loads(read_text(self._done))
            traffic = tuple((float(at), int(sent)) for at, sent in fields["traffic"])
            return RunRecord(**{**fields, "traffic": traffic, "machine": MachineInfo(**fields["machine"])})
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write(self, record: RunRecord) -> None:
        unfinished = self._done.with_suffix(".part")
        with disk_errors_explained(unfinished):
            unfinished.write_text(json.dumps(asdict(record)) + "\n")
            unfinished.replace(self._done)

    def clear(self) -> None:
        with disk_errors_explained(self.path):
            if self.path.exists():
                shutil.rmtree(self.path)
            self.path.mkdir(parents=True)

    def open(self, name: str) -> IO[str]:
        """Open a file beside the run for the output of a process."""
        with disk_errors_explained(self.path / name):
            return (self.path / name).open("w")


@contextmanager
def disk_errors_explained(path: Path) -> Iterator[None]:
    """Reports an error of the file system in one sentence."""
    try:
        yield
    except OSError as error:
        what = f"{error.filename or path} cannot be written: {error.strerror or error}"
        raise SetupError(what, "Set folder to a writable one.") from error


def last_output(output: str) -> str:
    """The message with which ``closeranks`` ended, or else the last line of the output."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    starts = [index for index, line in enumerate(lines) if line.startswith("closeranks: ")]
    if starts:
        return " ".join(lines[starts[-1] :][:3]).removeprefix("closeranks: ")
    return lines[-1] if lines else ""


def failed_runs(plan: ComparisonPlan) -> Sequence[ComparisonRunFolder]:
    """Runs that ended with a failure; clearing their folders makes them run again."""
    folders = [ComparisonRunFolder(plan, run) for run in plan.runs]
    return [folder for folder in folders if (record := folder.read()) and record.exit_code and not record.is_stopped]


def mixed_machines(records: Sequence[RunRecord | None], here: MachineInfo) -> str:
    """A warning if times of several machines would be mixed; None stands for a run that is still to be made here."""
    others = [record.machine for record in records if record is not None and record.machine != here]
    if not others or (len(set(others)) == 1 and len(others) == len(records)):
        return ""
    where = " and ".join(str(machine) or "an unknown machine" for machine in dict.fromkeys(others))
    runs = f"{count(len(others), 'finished run')} {'is' if len(others) == 1 else 'are'} of {where}"
    return f"{runs}, not of {here}: times of different machines are mixed."
