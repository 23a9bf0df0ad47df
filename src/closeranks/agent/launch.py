"""What is an agent told to start, and what does it answer when it is over?"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from closeranks import __version__
from closeranks.agent.ending import Reason
from closeranks.core.errors import SetupError

if TYPE_CHECKING:
    from closeranks.agent.config import AgentConfig
    from closeranks.agent.gate import Door
    from closeranks.agent.limits import Limits


@dataclass(frozen=True, slots=True)
class Fitted:
    """A job cut to fewer workers."""

    num_workers: int
    payload: Mapping[str, Any]
    words: str = ""
    """What changed, for people; empty where nothing did."""


@dataclass(frozen=True, slots=True)
class Survival:
    """How a run goes on after faults."""

    limits: Limits
    fit: Callable[[int, int], Fitted | None]
    """What to run on so many workers at most, of so many that were wanted; None: it cannot go on with so few."""
    samples_of: Callable[[int], str]
    """Which samples a step takes, in words for people."""
    warm: str = ""
    """``package.module:function``, called in the zygote as ``function(payload)`` once its first workers live, so that
    later ones start faster; empty: nothing is."""


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """The workers of one host."""

    num_workers: int
    entry: str
    """``package.module:function``, called in each worker as ``function(payload, link)``; it returns the exit code."""
    log_folder: Path
    environment: Mapping[str, str]
    """The whole environment of the zygote and its workers: ``core.environment.child_environment``."""
    config: AgentConfig
    payload: Mapping[str, Any] = field(default_factory=dict)
    """JSON values for the entry, the same for every worker."""
    preload: tuple[str, ...] = ()
    """Modules that the zygote imports before it forks; the entry's own module comes last by itself."""
    sys_path: tuple[str, ...] = ()
    """Folders put before all others on the zygote's search path."""
    num_hosts: int = 1
    """How many hosts must have joined before the first generation begins."""
    most_hosts: int = 1
    """Up to how many hosts it grows; with more than that, the others stand by."""
    survival: Survival | None = None
    """None: the first fault ends the run."""
    is_elastic: bool = False
    """Whether workers keep copies of their state in memory of the agent's: so where faults are survived."""
    rescues: bool = False
    """Whether what workers kept in memory is written down when the run fails: so where it saves its state at all."""
    must_finish: bool = True
    """Whether a worker is done only when its entry has returned. A user's script may also leave by any exit with 0."""
    threads: int = 0
    """Of each worker; 0: every host decides by its cores."""
    zygote_log: str = "zygote.log"
    """Hosts share the folder: each has a file of its own."""
    door: Door | None = None
    """Where other hosts may come in; None: nobody does."""

    def __post_init__(self) -> None:
        if self.num_workers < 1:
            raise SetupError(f"{self.num_workers} workers cannot be started", "Ask for at least one.")


@dataclass(frozen=True, slots=True)
class Listener:
    """Who hears what happens. All are called from the agent's one thread, and must not take long."""

    on_event: Callable[[int, dict[str, Any]], None]
    """Rank and event, of every worker."""
    on_output: Callable[[int, str], None]
    """Rank 0's printed lines."""
    on_note: Callable[[str], None]
    """What a person should know of the run itself, in a sentence."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended that did not fail."""

    reason: Reason
    statuses: Mapping[int, int] = field(default_factory=dict)
    """Exit status by rank: the code, or the negative number of a signal. Empty when no worker had started."""
    rescued: str = ""
    """Where the state lies that nobody had the time to save, in a sentence."""


def plan_fields(plan: LaunchPlan) -> dict[str, Any]:
    """What another host must know to run workers of this plan; what it may find out for itself is left out. ``job`` is
    another one each time: who comes back to another job must not bring its memory along."""
    limits = plan.survival.limits if plan.survival else None
    return {
        "version": __version__,
        "job": secrets.token_hex(8),
        "cwd": os.getcwd(),
        "entry": plan.entry,
        "payload": dict(plan.payload),
        "warm": plan.survival.warm if plan.survival else "",
        "preload": list(plan.preload),
        "sys_path": list(plan.sys_path),
        "log_folder": str(plan.log_folder.absolute()),
        "threads": plan.threads,
        "limits": None if limits is None else {name: getattr(limits, name) for name in limits.__slots__},
    }
