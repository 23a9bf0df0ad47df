"""What is a sink, and what is it given? The protocol, the registry, and what a run remembers of its sinks.

A sink is one file with one class under ``@SINKS.register``, named as its key in ``[telemetry]``. Invariant: a sink
imports its package in ``open``, in the worker and on the thread that uses it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from closeranks.core.errors import SetupError
from closeranks.core.events import Event
from closeranks.core.registry import Registry
from closeranks.core.system.regular_file import read_text
from closeranks.telemetry.config import TelemetryConfig
from closeranks.telemetry.run_log.run_folder import RunFolder
from closeranks.telemetry.sinks.metrics import PER_STEP, Rates, values_of

_MOST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class SinkContext:
    """What a sink may know about its run."""

    folder: Path
    config: TelemetryConfig
    emit: Callable[[Event], None] = lambda event: None
    """For warnings of its own."""
    job: Mapping[str, Any] = field(default_factory=dict)
    """The resolved job, as plain values."""


class Sink(Protocol):
    """Call sequence: it is made on the training thread, where it checks what the user must fix before a run begins
    (``UserError``); then, on one thread of its own, ``open``, ``handle`` for each batch of events, ``close`` once.

    Each of the three may block and may raise anything. After a failure ``open`` is called again, some time later, and
    the batch that failed is handled again.
    """

    @property
    def name(self) -> str:
        """As in warnings: ``telemetry.mlflow``."""
        ...

    @property
    def fix(self) -> str:
        """What to do about a failure."""
        ...

    def open(self) -> None: ...

    def handle(self, events: Sequence[Event]) -> None: ...

    def close(self) -> None: ...


SINKS: Registry[Callable[[SinkContext], Sink]] = Registry("telemetry sink")


class MissingPackageError(SetupError):
    """Trying again does not help."""

    def __init__(self, name: str, package: str) -> None:
        fix = "Run `pip install closeranks[track]`, and start the run again."
        super().__init__(f"{name} needs the package {package}, which is not installed", fix)


class SinkMemory:
    """What a sink must know again after its worker was lost (``RUN/sinks.json``): the id of its run in a tracker, the
    port it was given."""

    def __init__(self, folder: Path) -> None:
        self._path = RunFolder(folder).sinks

    def get(self, name: str) -> str:
        return self._load().get(name, "")

    def put(self, name: str, value: str) -> None:
        """A reader finds the old file or the new one, never half of one."""
        values = {**self._load(), name: value}
        temporary = self._path.with_name(f".{self._path.name}.{name}")
        temporary.write_text(json.dumps(values) + "\n")
        os.replace(temporary, self._path)

    def _load(self) -> dict[str, str]:
        try:
            values = json.loads(read_text(self._path, _MOST_BYTES))
        except (OSError, ValueError, RecursionError):
            return {}
        found = values if isinstance(values, dict) else {}
        return {name: value for name, value in found.items() if isinstance(value, str)}


def tracked(events: Iterable[Event], rates: Rates, every: int) -> dict[int, dict[str, float]]:
    """For trackers, which keep a series under each path: values by step, of every ``every``-th step and of all events
    that do not come with each step."""
    found: dict[int, dict[str, float]] = {}
    for event in events:
        measured = rates.observe(event)
        step = getattr(event, "step", None)
        if event.name in PER_STEP and step is not None and step % every:
            continue
        step = rates.step if step is None else step
        values = found.setdefault(step, {})
        values.update((one.path, one.value) for one in (*values_of(event), *measured))
    return {step: values for step, values in found.items() if values}
