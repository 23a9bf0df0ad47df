"""The status file of a run, for people and tools in another terminal.

The agent writes ``RUN/status.json``; anybody may read it. Invariants: a reader finds the file whole or not at all (it
is replaced, never overwritten in place); a status is trusted only as far as its writer can still be found, so that a
file left behind by a killed agent is reported as such; a full disk costs a warning, never the run. No torch.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from closeranks.core.dataclass_fields import checked_fields
from closeranks.core.system.linux import boot_id
from closeranks.core.system.regular_file import read_text
from closeranks.telemetry.goodput.loss_target import LossTarget
from closeranks.telemetry.goodput.time_account import TimeAccount
from closeranks.telemetry.run_log.run_folder import RunFolder

_EVERY_S = 0.5
_MOST_BYTES = 64 << 20
_LATEST = 1e11
"""In Unix time: the year 5138."""
_FRESH_S = 10.0
"""A healthy agent never leaves a status older than this."""
ENDED = ("finished", "drained", "interrupted", "disconnected", "terminated", "stopped", "failed")
"""States after which nothing more will be written."""
UNWATCHED = "unwatched"
"""The state of a run that was started without our agent."""


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One worker. For a worker on another host than the agent's, only its step and phase are known."""

    rank: int = 0
    host: str = ""
    pid: int | None = None
    step: int | None = None
    """The step it works on; None before its first."""
    phase: str = ""
    """In words."""
    own_s: float = 0.0
    """Its own computing time per micro-batch in the last step, without waiting; 0: unknown."""
    memory_bytes: int = 0
    """Resident; 0: unknown."""


@dataclass(frozen=True, slots=True)
class HostStatus:
    name: str = ""
    num_workers: int = 0
    state: str = ""


@dataclass(frozen=True, slots=True)
class StatusEvent:
    """A line of text and the wall-clock time of what it reports."""

    at: float = 0.0
    text: str = ""


@dataclass(frozen=True, slots=True)
class StatusProcess:
    """Identifies the process that wrote a status: enough to tell whether it still lives, even if its pid is reused."""

    pid: int = 0
    born: int = 0
    """Its start time according to the kernel, in ticks since boot."""
    host: str = ""
    boot: str = ""


@dataclass(frozen=True, slots=True)
class RunStatus:
    run: str = ""
    state: str = "starting"
    """``starting``, ``running``, ``closing ranks``, ``stopping``, or how it ended."""
    writer: StatusProcess = StatusProcess()
    began_at: float = 0.0
    at: float = 0.0
    """``time.time()`` when it was written."""
    generation: int = 0
    world_size: int = 0
    step: int = 0
    """Finished steps."""
    num_steps: int = 0
    workers: tuple[WorkerStatus, ...] = ()
    hosts: tuple[HostStatus, ...] = ()
    happened: tuple[StatusEvent, ...] = ()
    """The most recent events, oldest first."""
    snapshot_every: int = 0
    """Steps between snapshots of the state in memory; 0: none, or not decided yet."""
    snapshot_bytes: int = 0
    """Memory that the snapshots take on the agent's host."""

    device: str = ""
    """The name of the workers' device; empty: not known yet."""
    item: str = "token"
    eta_s: float | None = None
    """Time that the remaining steps will take,"""
    eta_error_s: float | None = None
    """and by how much that may be wrong, with a probability of 90%."""
    account: TimeAccount = field(default_factory=TimeAccount)
    """Where the time of all workers went since the run began, earlier commands included."""
    target: LossTarget | None = None
    """The loss that the job wants to reach."""
    notes: list[str] = field(default_factory=list)
    """What is missing, in sentences, where this was read from metrics that have gaps."""

    @property
    def has_ended(self) -> bool:
        return self.state in ENDED


class StatusWriter:
    """Writes at most twice a second, and at once when the generation or the state changes.

    Call sequence: ``write`` whenever ``is_due``; the end of the run is written like any other state.
    """

    def __init__(
        self,
        folder: Path,
        *,
        on_problem: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = RunFolder(folder).status
        self._on_problem = on_problem
        self._clock = clock
        self._written_at: float | None = None
        self._last: tuple[int, str] | None = None
        self._has_failed = self._has_written = False

    @property
    def next_at(self) -> float:
        """The latest time, on ``clock``, at which the next write is due."""
        return self._clock() if self._written_at is None else self._written_at + _EVERY_S

    def is_due(self, generation: int, state: str) -> bool:
        return (generation, state) != self._last or self._clock() >= self.next_at

    def write(self, status: RunStatus) -> None:
        """Replace the file. A failure is reported once, and the next write tries again."""
        self._last, self._written_at = (status.generation, status.state), self._clock()
        unfinished = self._path.with_name(".status.json")
        try:
            if self._has_written:  # the run's folder was removed since
                self._path.parent.mkdir(parents=True, exist_ok=True)
            unfinished.write_text(encode_status(status) + "\n")
            unfinished.replace(self._path)
            self._has_failed, self._has_written = False, True
        except OSError as error:
            if not self._has_failed and self._on_problem is not None:
                self._on_problem(f"{self._path} cannot be written: {error.strerror}; `closeranks status` shows nothing")
            self._has_failed = True


def encode_status(status: RunStatus, **more: Any) -> str:
    return json.dumps({**dataclasses.asdict(status), **more}, indent=1)


def decode_status(values: Mapping[str, Any]) -> RunStatus:
    """A status of this version or of a newer one: unknown fields are ignored, missing ones take their defaults.
    ``TypeError``, ``ValueError`` or ``AttributeError`` if a value does not fit a status."""
    kinds: dict[str, type[Any]] = {"workers": WorkerStatus, "hosts": HostStatus, "happened": StatusEvent}
    own = checked_fields(RunStatus, values)
    own |= {
        name: tuple(kind(**checked_fields(kind, item)) for item in own.get(name, ())) for name, kind in kinds.items()
    }
    target = values.get("target")
    parts = {
        "target": None if target is None else LossTarget(**checked_fields(LossTarget, target)),
        "writer": StatusProcess(**checked_fields(StatusProcess, values.get("writer", {}))),
        "account": TimeAccount(**checked_fields(TimeAccount, values.get("account", {}))),
    }
    status = RunStatus(**{**own, **parts})
    if not all(0 <= at <= _LATEST for at in (status.at, status.began_at, *(one.at for one in status.happened))):
        raise ValueError("a time in the status is not valid")
    return status


def read_status(folder: Path) -> RunStatus | None:
    """The latest status that the agent wrote; None if there is no such file, or none that can be read."""
    try:
        return decode_status(json.loads(read_text(RunFolder(folder).status, _MOST_BYTES)))
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return None


class StatusFreshness(Enum):
    """How far a status can be trusted."""

    NOW = "now"
    """Its agent is alive and healthy."""
    ENDED = "ended"
    """The agent recorded how the run ended."""
    GONE = "gone"
    """The agent is gone, and did not record how the run ended."""
    SILENT = "silent"
    """The agent is alive and has not written for a while: it is stopped, or its disk is full."""
    FAR = "far"
    """The agent was on another machine and has not written for a while: it cannot be checked from here."""
    UNWATCHED = "unwatched"
    """There never was an agent of ours: the run was started by torchrun, srun or plain Python."""


def status_freshness(status: RunStatus, now: float, is_alive: bool | None) -> StatusFreshness:
    """``is_alive`` is None if the writer ran on another machine. ``now`` is the wall clock."""
    if status.has_ended:
        return StatusFreshness.ENDED
    if status.state == UNWATCHED:
        return StatusFreshness.UNWATCHED
    if is_alive is False:
        return StatusFreshness.GONE
    if now - status.at <= _FRESH_S:
        return StatusFreshness.NOW
    return StatusFreshness.FAR if is_alive is None else StatusFreshness.SILENT


def this_process() -> StatusProcess:
    pid = os.getpid()
    return StatusProcess(pid, _born(pid) or 0, socket.gethostname(), boot_id())


def is_alive(writer: StatusProcess) -> bool | None:
    """Whether exactly that process is alive; None if it was on another machine."""
    if writer.host != socket.gethostname():
        return None
    return writer.boot == boot_id() and _born(writer.pid) == writer.born


def _born(pid: int) -> int | None:
    """The kernel's start time of a process; None if there is none, or only a zombie."""
    try:
        # The program's name is in the parentheses and may contain anything.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[19]) if fields[0] not in "ZX" else None


def resident_bytes(pid: int | None) -> int:
    """Resident memory of a process of this machine; 0 if it is gone."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
