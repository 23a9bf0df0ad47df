"""The launch plan that an agent is given, its callbacks, and the outcome that it returns."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from closeranks import __version__
from closeranks.agent.job.shutdown import Reason
from closeranks.core.errors import SetupError

if TYPE_CHECKING:
    from closeranks.agent.config import AgentConfig
    from closeranks.agent.fault_limits import FaultLimits
    from closeranks.agent.transport.host_connections import JoinEndpoint


@dataclass(frozen=True, slots=True)
class ResizedLaunch:
    """A job resized to fewer workers."""

    num_workers: int
    payload: Mapping[str, Any]
    summary: str = ""
    """What changed, for people; empty where nothing did."""


@dataclass(frozen=True, slots=True)
class RecoverySettings:
    """How a run recovers from faults."""

    limits: FaultLimits
    fit: Callable[[int, int], ResizedLaunch | None]
    """``fit(num_available, num_wanted)``: the job on at most so many workers; None: it cannot run on so few."""
    samples_of: Callable[[int], str]
    """Which samples a step takes, in words for people."""
    warm_up: str = ""
    """``package.module:function``, called in the zygote as ``function(payload)`` once its first workers are alive, so
    that later ones start faster; empty: nothing is called."""


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """The workers of one host."""

    num_workers: int
    entry: str
    """``package.module:function``, called in each worker as ``function(payload, link)``; it returns the exit code."""
    log_folder: Path
    environment: Mapping[str, str]
    """The whole environment of the zygote and its workers: ``core.system.environment.child_environment``."""
    config: AgentConfig
    payload: Mapping[str, Any] = field(default_factory=dict)
    """JSON values for the entry, the same for every worker."""
    preload: tuple[str, ...] = ()
    """Modules that the zygote imports before it forks; the entry's own module is added at the end."""
    sys_path: tuple[str, ...] = ()
    """Folders put before all others on the zygote's search path."""
    num_hosts: int = 1
    """How many hosts must have joined before the first generation begins."""
    max_hosts: int = 1
    """Up to how many hosts the job grows; further hosts are kept as spares."""
    recovery_settings: RecoverySettings | None = None
    """None: the first fault ends the run."""
    is_elastic: bool = False
    """Whether workers keep snapshots in the agent's memory; true where the run recovers from faults."""
    rescues: bool = False
    """Whether snapshots in memory are written to disk when the run fails; true where the run saves its state at all."""
    must_finish: bool = True
    """Whether a worker is done only when its entry has returned. A user's script may also end by any exit with 0."""
    threads: int = 0
    """Threads of each worker; 0: every host decides by its cores."""
    zygote_log: str = "zygote.log"
    """Hosts share the folder, so each has its own file."""
    join_endpoint: JoinEndpoint | None = None
    """Where other hosts may join; None: no host can."""

    def __post_init__(self) -> None:
        if self.num_workers < 1:
            raise SetupError(f"{self.num_workers} workers cannot be started", "Ask for at least one.")


@dataclass(frozen=True, slots=True)
class AgentCallbacks:
    """Callbacks of an agent. All are called from the agent's one thread, and must return quickly."""

    on_event: Callable[[int, dict[str, Any]], None]
    """Rank and event, of every worker."""
    on_output: Callable[[int, str], None]
    """Rank 0's printed lines."""
    on_note: Callable[[str], None]
    """A sentence about the run itself, for the user."""


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """How a run that did not fail ended."""

    reason: Reason
    statuses: Mapping[int, int] = field(default_factory=dict)
    """Exit status by rank: the code, or the negative number of a signal. Empty when no worker had started."""
    rescued: str = ""
    """Where state that there was no time to save was written, in a sentence."""


def encode_plan(plan: LaunchPlan) -> dict[str, Any]:
    """What another host must know to run workers of this plan; what it can find out by itself is left out. ``job`` is
    new each time: a host that reconnects to another job must not use its memory of the earlier one."""
    limits = plan.recovery_settings.limits if plan.recovery_settings else None
    return {
        "version": __version__,
        "job": secrets.token_hex(8),
        "cwd": os.getcwd(),
        "entry": plan.entry,
        "payload": dict(plan.payload),
        "warm": plan.recovery_settings.warm_up if plan.recovery_settings else "",
        "preload": list(plan.preload),
        "sys_path": list(plan.sys_path),
        "log_folder": str(plan.log_folder.absolute()),
        "threads": plan.threads,
        "limits": None if limits is None else {name: getattr(limits, name) for name in limits.__slots__},
    }
