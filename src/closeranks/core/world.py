"""Where does this process stand among all workers of a run?

``World`` is a plain value: tests construct it, ``core.environment`` detects it in production, and the agent hands it to
the workers it forks. Invariant: world size 1 is an ordinary world, not a special case.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Launcher = Literal["single", "agent", "torchrun", "slurm", "testing"]


@dataclass(frozen=True, slots=True)
class World:
    """One generation's membership as one worker sees it."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    launcher: Launcher = "single"
    generation: int = 0
    store: str = ""
    """``host:port`` of the store the group forms on; empty where the launcher has its own way."""
    hosts: tuple[int, ...] = ()
    """On which host each rank is, by number; empty: all on this one."""

    def host_of(self, rank: int) -> int:
        return self.hosts[rank] if self.hosts else 0

    @property
    def is_first_generation(self) -> bool:
        """Whether the run begins with these workers: a place that cannot be written is the person's mistake then, and
        a fault of the machine, which ends nothing, when they go on with what others began."""
        return self.generation == 0

    @property
    def is_lead(self) -> bool:
        """Rank 0 speaks for the run: people hear from it alone."""
        return self.rank == 0
