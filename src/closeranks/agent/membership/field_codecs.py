"""Codecs that validate the fields of membership messages.

Each codec decodes one plain JSON value into the value of a field, and encodes it back. Invariant: a value is accepted
as it is, or ``ProtocolError`` says in one sentence what is wrong with it; nothing is executed or guessed, and
only an integer is converted, to a float.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

from closeranks.core.errors import CloseranksError
from closeranks.core.requests import REQUESTS, RunRequest

MOST = (1 << 63) - 1
_MAX_DEPTH = 16
_MAX_NODES = 1 << 20
_MAX_RUNS = 1 << 16
_MAX_WORKERS = 1 << 20


class ProtocolError(CloseranksError):
    """A message that does not follow the protocol. Its sender is refused, and nothing of it is used."""

    def __init__(self, what: str) -> None:
        super().__init__(what, "Check that every host runs the same version of closeranks and belongs to this job.")


class FieldCodec(Protocol):
    def decode(self, name: str, value: Any) -> Any: ...

    def encode(self, value: Any) -> Any: ...


class _Plain:
    """A value that is its own encoding."""

    def encode(self, value: Any) -> Any:
        return value


@dataclass(frozen=True, slots=True)
class IntCodec(_Plain):
    least: int = 0
    most: int = MOST

    def decode(self, name: str, value: Any) -> int:
        if type(value) is not int or not self.least <= value <= self.most:
            raise ProtocolError(f"{name} must be a whole number from {self.least} to {self.most}, not {shown(value)}")
        return value


@dataclass(frozen=True, slots=True)
class FloatCodec(_Plain):
    """Seconds and the like: finite and not negative. An integer is accepted, as some JSON writers write 3.0 as 3."""

    least: float = 0.0
    most: float = 1e9

    def decode(self, name: str, value: Any) -> float:
        if type(value) not in (int, float) or not self.least <= value <= self.most:
            raise ProtocolError(f"{name} must be a number from {self.least:g} to {self.most:g}, not {shown(value)}")
        return float(value)


@dataclass(frozen=True, slots=True)
class StrCodec(_Plain):
    most: int = 4096
    is_name: bool = False
    """A name is not empty and has printable characters only."""

    def decode(self, name: str, value: Any) -> str:
        if type(value) is not str or len(value) > self.most:
            raise ProtocolError(f"{name} must be text of at most {self.most} characters, not {shown(value)}")
        if self.is_name and not (value and value.isprintable() and not value.isspace()):
            raise ProtocolError(f"{name} must be a name that can be printed, not {shown(value)}")
        return value


class BoolCodec(_Plain):
    def decode(self, name: str, value: Any) -> bool:
        if type(value) is not bool:
            raise ProtocolError(f"{name} must be true or false, not {shown(value)}")
        return value


class DictCodec(_Plain):
    """A dict of JSON values, of bounded depth and size; its reader interprets it."""

    def decode(self, name: str, value: Any) -> dict[str, Any]:
        if type(value) is not dict:
            raise ProtocolError(f"{name} must be a table, not {shown(value)}")
        _check_json(name, value)
        return value


def _check_json(name: str, root: Any) -> None:
    """Breadth first, so that a deeply nested value reaches our bound and not the interpreter's recursion limit."""
    level, num_nodes = [root], 0
    for _ in range(_MAX_DEPTH):
        num_nodes += len(level)
        if num_nodes > _MAX_NODES:
            raise ProtocolError(f"{name} holds more than {_MAX_NODES} values")
        below: list[Any] = []
        for value in level:
            if type(value) is dict:
                if not all(type(key) is str for key in value):
                    raise ProtocolError(f"{name} has a key that is not text")
                below.extend(value.values())
            elif type(value) is list:
                below.extend(value)
            elif type(value) is float and not math.isfinite(value):
                raise ProtocolError(f"{name} holds a number that is not finite")
            elif value is not None and type(value) not in (str, int, float, bool):
                raise ProtocolError(f"{name} holds {shown(value)}, which is not a JSON value")
        if not below:
            return
        level = below
    raise ProtocolError(f"{name} is nested deeper than {_MAX_DEPTH} levels")


class RequestCodec:
    """A request to the run, by its name."""

    def encode(self, value: RunRequest) -> str:
        return value.kind

    def decode(self, name: str, value: Any) -> RunRequest:
        if type(value) is not str or value not in REQUESTS:
            raise ProtocolError(f"{name} must be one of {', '.join(REQUESTS)}, not {shown(value)}")
        return REQUESTS[value]


class RunLengthCodec:
    """Numbers of workers per host, run-length encoded: 10,000 hosts of 8 workers are sent as ``[[8, 10000]]``."""

    def encode(self, value: tuple[int, ...]) -> list[list[int]]:
        runs: list[list[int]] = []
        for count in value:
            if runs and runs[-1][0] == count:
                runs[-1][1] += 1
            else:
                runs.append([count, 1])
        return runs

    def decode(self, name: str, value: Any) -> tuple[int, ...]:
        if type(value) is not list or not 0 < len(value) <= _MAX_RUNS or not all(_is_run(run) for run in value):
            raise ProtocolError(f"{name} must be runs of [workers, hosts], not {shown(value)}")
        num_hosts = sum(run[1] for run in value)
        if sum(run[0] * run[1] for run in value) > _MAX_WORKERS or num_hosts > _MAX_WORKERS:
            raise ProtocolError(f"{name} describes more than {_MAX_WORKERS} workers")
        return tuple(count for count, times in value for _ in range(times))


def _is_run(run: Any) -> bool:
    is_pair = type(run) is list and len(run) == 2 and all(type(number) is int for number in run)
    return is_pair and 1 <= run[0] <= _MAX_WORKERS and 1 <= run[1] <= _MAX_WORKERS


def shown(value: Any) -> str:
    """An untrusted value for an error message: short, and without a container's contents, which may be large."""
    if isinstance(value, (dict, list)):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, str):
        return repr(value[:40] + "..." if len(value) > 40 else value)
    if isinstance(value, int) and value.bit_length() > 128:
        return "a number of many digits"
    return repr(value)[:60]
