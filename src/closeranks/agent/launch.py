"""What is an agent told to start, and what does it answer when it is over?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from closeranks.agent.ending import Reason
from closeranks.core.errors import SetupError

if TYPE_CHECKING:
    from closeranks.agent.config import AgentConfig


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

    @property
    def is_clean(self) -> bool:
        """Whether every worker left by itself; False where patience ended and some were killed."""
        return all(status == 0 for status in self.statuses.values())
