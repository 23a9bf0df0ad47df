"""Carries a request for a trace to a running job, and the answer back, as two small files in the run folder.

    RUN/traces/request.json   written by ``closeranks profile``, removed by rank 0 when it takes it
    RUN/traces/answer.json    written by rank 0: which steps are traced, or why none are

A file reaches a run however it was started: by our agent, torchrun, srun or plain Python. Invariants: a request is
taken once, so that one which kills a worker is not repeated after the recovery; both files appear whole or not at all;
nobody trusts their content.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from closeranks.core.dataclass_fields import checked_fields
from closeranks.core.errors import SetupError, UserError
from closeranks.core.system.regular_file import open_descriptor, read_text
from closeranks.telemetry.run_log.run_folder import RunFolder

MOST_STEPS = 100
_MOST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class TraceRequest:
    id: str = ""
    num_steps: int = 0
    ranks: list[int] = field(default_factory=list)
    """Empty: all."""

    def traces(self, rank: int) -> bool:
        return not self.ranks or rank in self.ranks

    def problem(self, world_size: int) -> str:
        """Why it cannot be granted; empty if it can."""
        if not 1 <= self.num_steps <= MOST_STEPS:
            return f"between 1 and {MOST_STEPS} steps can be traced, not {self.num_steps}"
        if unknown := [rank for rank in self.ranks if not 0 <= rank < world_size]:
            return f"there is no rank {unknown[0]}: the run has ranks 0 to {world_size - 1}"
        return ""


@dataclass(frozen=True, slots=True)
class TraceAnswer:
    id: str = ""
    refusal: str = ""
    """Why nothing is traced; empty if something is."""
    first_step: int = 0
    last_step: int = 0
    generation: int = 0
    ranks: list[int] = field(default_factory=list)


def new_request(num_steps: int, ranks: list[int]) -> TraceRequest:
    return TraceRequest(secrets.token_hex(8), num_steps, ranks)


def encode_request(request: TraceRequest) -> str:
    return json.dumps(dataclasses.asdict(request))


def decode_request(text: str) -> TraceRequest:
    """``ValueError`` or ``TypeError`` for anything else than a request."""
    return TraceRequest(**checked_fields(TraceRequest, _object(text)))


def _object(text: str) -> dict[str, object]:
    values = json.loads(text)
    if not isinstance(values, dict):
        raise ValueError("not an object")
    return values


class TraceMailbox:
    """``claim``, ``post``, ``answer_to`` and ``withdraw`` are called by who asks, ``take`` and ``answer`` by rank 0."""

    def __init__(self, folder: Path) -> None:
        self._folder = RunFolder(folder).traces
        self._request, self._answer = self._folder / "request.json", self._folder / "answer.json"
        self._request_name = str(self._request)

    @contextmanager
    def claim(self) -> Iterator[None]:
        """One request at a time: refuses the second process that asks. The lock ends with its process."""
        try:
            self._folder.mkdir(exist_ok=True)
            lock = open_descriptor(self._folder / ".lock", os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise _unwritable(self._folder, error) from error
        try:
            _lock(lock)
            yield
        finally:
            os.close(lock)

    def post(self, request: TraceRequest) -> None:
        try:
            _replace(self._request, encode_request(request))
        except OSError as error:
            raise _unwritable(self._folder, error) from error

    def withdraw(self) -> None:
        """Remove a request that nobody has taken."""
        with suppress(OSError):
            self._request.unlink(missing_ok=True)

    @property
    def is_waiting(self) -> bool:
        """Whether a request has not been taken yet."""
        return self._request.exists()

    def answer_to(self, request: TraceRequest) -> TraceAnswer | None:
        try:
            answer = TraceAnswer(**checked_fields(TraceAnswer, _object(read_text(self._answer, _MOST_BYTES))))
        except (OSError, ValueError, TypeError, RecursionError):
            return None
        return answer if answer.id == request.id else None

    def take(self) -> TraceRequest | None:
        """The request, if there is one, which is removed. ``OSError`` if it cannot be, ``ValueError`` or ``TypeError``
        if it is none. Costs a few microseconds when there is nothing."""
        try:
            os.stat(self._request_name)
        except FileNotFoundError:
            return None
        try:
            text = read_text(self._request, _MOST_BYTES)
        finally:
            self._request.unlink(missing_ok=True)
        try:
            return decode_request(text)
        except RecursionError:
            raise ValueError("nested too deeply") from None

    def answer(self, answer: TraceAnswer) -> None:
        """``OSError`` if it cannot be written."""
        _replace(self._answer, json.dumps(dataclasses.asdict(answer)))


def _lock(file: int) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        what = "another `closeranks profile` is tracing this run"
        raise UserError(what, "Wait until it has ended, then ask again.") from None


def _unwritable(folder: Path, error: OSError) -> SetupError:
    what = f"{folder} cannot be written: {error.strerror or error}"
    return SetupError(what, "Ask as a user who may write to the run folder, and make room there.")


def _replace(path: Path, text: str) -> None:
    unfinished = path.with_name(f".{path.name}")
    unfinished.write_text(text)
    unfinished.replace(path)
