"""The errors that a run can end with, with their exit statuses.

    CloseranksError                 exit 1   everything this package raises on purpose
    ├── UserError                   exit 2   the user can fix it: one sentence, no traceback
    │   ├── ConfigError                      the job file or the command line (all problems at once)
    │   ├── ModelError                       a model, factory or loss that cannot be used
    │   ├── DataError                        a dataset that is missing, empty, or holds bad values
    │   │   └── BadRecordError               one record of it, which a job may skip
    │   ├── CheckpointError                  a state file that is missing, foreign or damaged
    │   └── SetupError                       the machine: folder, port, device, disk space
    ├── RunFailed                   exit 1   a worker died or raised; carries the report
    ├── Interrupted                 exit 130 Ctrl-C ended the run
    └── Drained                     exit 143 SIGTERM ended the run; a scheduler may start it again
        └── Disconnected            exit 129 SIGHUP ended it: its terminal or ssh connection was lost

Invariant: a message says what is wrong and what to do about it, with rank and step where they are known, and it
survives the trip from a worker to the agent: ``encode`` and ``decode`` are inverse up to the traceback.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar


class CloseranksError(Exception):
    """What happened, what to do about it, and where (rank, step) if that is known."""

    exit_code: ClassVar[int] = 1

    def __init__(self, what: str, fix: str = "", *, rank: int | None = None, step: int | None = None) -> None:
        self.what = what
        self.fix = fix
        self.rank = rank
        self.step = step
        super().__init__(what, fix)

    def __str__(self) -> str:
        place = ", ".join(
            f"{name} {value}" for name, value in (("rank", self.rank), ("step", self.step)) if value is not None
        )
        where = f" ({place})" if place else ""
        advice = f" {self.fix}" if self.fix else ""
        stop = "" if self.what.endswith((".", "?")) else "."
        return f"{self.what}{where}{stop}{advice}"


class UserError(CloseranksError):
    exit_code = 2


class ModelError(UserError): ...


class DataError(UserError): ...


class BadRecordError(DataError):
    """One record cannot be used: damaged, or refused by a check. A job may skip it (``data.on_bad``)."""


class CheckpointError(UserError): ...


class SetupError(UserError): ...


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with a job: its place, what is wrong, how to fix it."""

    place: str
    what: str
    fix: str = ""
    origin: str = ""

    def __str__(self) -> str:
        source = f" [{self.origin}]" if self.origin else ""
        advice = f" {self.fix}" if self.fix else ""
        return f"{self.place}{source}: {self.what}.{advice}"


class ConfigError(UserError):
    """All problems of a job at once, in the order of the file."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__(f"{count} in the job:\n" + "\n".join(f"  {problem}" for problem in self.problems))

    def __str__(self) -> str:
        return self.what

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[Problem, ...]]]:
        return ConfigError, (self.problems,)


class RunFailed(CloseranksError):
    """A worker died or raised. ``what`` is the whole report, the root cause first."""

    def __str__(self) -> str:
        return self.what


class Interrupted(CloseranksError):
    exit_code = 130


class Drained(CloseranksError):
    exit_code = 143


class Disconnected(Drained):
    exit_code = 129


_KINDS: dict[str, type[CloseranksError]] = {
    kind.__name__: kind
    for kind in (
        CloseranksError,
        UserError,
        ModelError,
        DataError,
        BadRecordError,
        CheckpointError,
        SetupError,
        RunFailed,
        Interrupted,
        Drained,
        Disconnected,
    )
}

ENDINGS: dict[str, type[CloseranksError]] = {
    "interrupted": Interrupted,
    "drained": Drained,
    "disconnected": Disconnected,
}
"""Errors that end a run because somebody asked it to stop."""


def encode(error: CloseranksError) -> dict[str, Any]:
    """An error as plain values, to be sent from a worker to its agent."""
    if isinstance(error, ConfigError):
        problems = [[p.place, p.what, p.fix, p.origin] for p in error.problems]
        return {"kind": "ConfigError", "problems": problems}
    return {
        "kind": type(error).__name__ if type(error).__name__ in _KINDS else "CloseranksError",
        "what": error.what,
        "fix": error.fix,
        "rank": error.rank,
        "step": error.step,
    }


def decode(fields: dict[str, Any]) -> CloseranksError:
    """The error that ``encode`` was given; an unknown kind becomes the root of the tree."""
    if fields.get("kind") == "ConfigError":
        return ConfigError([Problem(*problem) for problem in fields["problems"]])
    kind = _KINDS.get(str(fields.get("kind")), CloseranksError)
    return kind(str(fields.get("what")), str(fields.get("fix", "")), rank=fields.get("rank"), step=fields.get("step"))
