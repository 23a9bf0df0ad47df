"""Records the events of a rank as JSON lines that outlive the process.

Each event is one ``write`` of one whole JSON line to a file opened for appending: a worker killed at any instant loses
nothing it had emitted, and what a full disk refuses is written when there is room (``core.system.append_file``).
Invariants: every line is strict JSON (a value that is not finite is written as the string ``NaN``, ``Infinity`` or
``-Infinity`` and read back as the number), and no failure in here ends training. Cost: about 15 us an event. Beside the
file of a rank lies an index, for those who read a long run (``index_writer``).
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from closeranks.core.errors import SetupError
from closeranks.core.events import Event, StepDone, Warned, decode
from closeranks.core.system.append_file import AppendFile
from closeranks.core.system.regular_file import open_binary
from closeranks.telemetry.run_log.index_writer import IndexWriter
from closeranks.telemetry.run_log.run_folder import RunFolder

Sink = Callable[[Event], None]
AGENT = -1
"""The agent's number among the recorders: it has no rank."""

_log = logging.getLogger(__name__)
_TAIL_BYTES = 1 << 16
LINE_BYTES = 16 << 20
"""No event is longer."""
_STRICT = json.JSONEncoder(allow_nan=False).encode
_COMMON: dict[str, tuple[type, ...]] = {"at": (int, float), "rank": (int,), "step": (int,)}
_FAR = 10**11
"""No line has a larger number under these keys; as a time, it is in the year 5138."""
_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class EventRecorder:
    """Writes the events of one rank, or of the ``AGENT``, to its file, then to its sinks in the order added."""

    def __init__(self, folder: Path, rank: int, *, must_open: bool = True) -> None:
        """``must_open``: a file that cannot be opened is the user's mistake, as before a run has begun; later it is a
        warning, and opening is retried."""
        self._rank = rank
        self._sinks: list[Sink] = []
        # Re-entrant: a sink that fails causes a warning, which is recorded while the first event still is.
        self._lock = threading.RLock()
        run = RunFolder(folder)
        path = run.agent if rank == AGENT else run.metrics(rank)
        self._notice = ""
        """A message about the file, to be recorded with the next event."""
        try:
            self._file = AppendFile(path, self._on_lost, self._on_back, must_open=must_open)
        except OSError as error:
            fix = "Choose another place with run.folder, or make this one writable."
            whose = None if rank == AGENT else rank
            raise SetupError(f"cannot write {path}: {error.strerror}", fix, rank=whose) from error
        self._index = None if rank == AGENT else IndexWriter(run.index(rank), self._file)

    def add_sink(self, sink: Sink) -> None:
        """``sink`` receives every event from now on, on the thread that emits; one that raises is removed."""
        self._sinks.append(sink)

    def emit(self, event: Event) -> None:
        """Record one event. Never raises: a full disk or a failing sink becomes a warning."""
        with self._lock:
            self._write(event)
            for sink in tuple(self._sinks):
                try:
                    sink(event)
                except Exception as error:
                    self._remove(sink, error)

    def close(self) -> None:
        with self._lock:
            if self._index is not None:
                self._index.close()
            self._file.close()

    def _write(self, event: Event) -> None:
        # As core.events.encode, with time and rank added, at a tenth of its cost.
        names: tuple[str, ...] = event.__match_args__
        at = time.time()
        line = {"event": event.name, "at": at, "rank": self._rank}
        line.update((name, getattr(event, name)) for name in names)
        data = to_line(line)
        self._file.write(data)
        if self._index is not None:
            self._index.add(event, at, data)
        if self._notice:
            notice, self._notice = self._notice, ""
            self.emit(Warned(notice))

    def _on_lost(self, why: str) -> None:
        self._notice = (
            f"{self._subject} cannot be written ({why}): training continues; they are written once they can be"
        )

    def _on_back(self, num_dropped: int) -> None:
        lost = f"{num_dropped} bytes of them were lost" if num_dropped else "nothing was lost"
        self._notice = f"{self._subject} are written again; {lost}"

    @property
    def _subject(self) -> str:
        return "the agent's metrics" if self._rank == AGENT else f"the metrics of rank {self._rank}"

    def _remove(self, sink: Sink, error: Exception) -> None:
        if sink not in self._sinks:
            return  # it failed again on the warning about itself
        self._sinks.remove(sink)
        name = getattr(sink, "__qualname__", type(sink).__name__)
        _log.warning("telemetry sink %s removed", name, exc_info=error)
        self.emit(Warned(f"{name} receives no more events: it raised {type(error).__name__}: {error}"))


def to_line(values: dict[str, Any]) -> bytes:
    """One strict JSON line. Finite values, nearly every line, need no second pass."""
    try:
        return (_STRICT(values) + "\n").encode()
    except ValueError:
        return (_STRICT(_without_nonfinite(values)) + "\n").encode()


def _without_nonfinite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nonfinite(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _with_nonfinite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: item if key == "what" else _with_nonfinite(item) for key, item in value.items()}
    return _WORDS.get(value, value) if isinstance(value, str) else value


def parse_line(line: bytes) -> dict[str, Any] | None:
    """The fields of a line; None if it is incomplete (its process was killed, or is writing it now)."""
    try:
        values = json.loads(line)
        if b"\\ud" in line.lower():  # half of a surrogate pair: it could not be encoded again
            json.dumps(values, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return _without_invalid_common_fields(_with_nonfinite(values)) if isinstance(values, dict) else None


def _without_invalid_common_fields(values: dict[str, Any]) -> dict[str, Any]:
    """Fields that every line has are dropped if they have the wrong type: a file may have come from anywhere."""
    for key, kinds in _COMMON.items():
        if key in values and (type(values[key]) not in kinds or not -_FAR <= values[key] <= _FAR):
            del values[key]
    return values


def read_events(path: Path) -> Iterator[tuple[dict[str, Any], Event | None]]:
    """Each whole line as its fields and its event (None for a kind this version does not know)."""
    for line in lines_of(path):
        if (values := parse_line(line)) is not None:
            yield values, decode(values)


def lines_of(path: Path) -> Iterator[bytes]:
    """The lines of a run's own file; none if there is no such file. A line that never ends is returned in parts."""
    try:
        with open_binary(path) as file:
            yield from iter(lambda: file.readline(LINE_BYTES), b"")
    except FileNotFoundError:
        return
    except OSError as error:
        raise SetupError(f"{path} cannot be read: {error.strerror}", "Name another run folder.") from error


def last_step(path: Path) -> int:
    """The highest step recorded in the last lines of a rank's file; 0 if there is none."""
    try:
        with open_binary(path) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return 0
    found = [parse_line(line) for line in lines]
    return max((int(one["step"]) for one in found if one is not None and one.get("event") == StepDone.name), default=0)
