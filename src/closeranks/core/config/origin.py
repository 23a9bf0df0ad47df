"""Records which source a value of the job comes from.

Invariant: every value of a loaded job has exactly one origin, that of the source which won.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["default", "file", "python", "command line"]


@dataclass(frozen=True, slots=True)
class ValueOrigin:
    """The source that set a value; ``place`` is the location in it, such as ``job.toml:12``, if known."""

    kind: Kind
    place: str = ""

    def __str__(self) -> str:
        return self.place or self.kind


DEFAULT = ValueOrigin("default")
PYTHON = ValueOrigin("python")
COMMAND_LINE = ValueOrigin("command line")
