"""The position of this process among all workers of a run.

``World`` is a plain value: tests construct it, ``core.system.environment`` detects it in production, and the agent
passes it to the workers it forks. Invariant: world size 1 is an ordinary world, not a special case.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Launcher = Literal["single", "agent", "torchrun", "slurm", "testing"]


@dataclass(frozen=True, slots=True)
class World:
    """The membership of one generation, as seen by one worker."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    launcher: Launcher = "single"
    generation: int = 0
    store: str = ""
    """``host:port`` of the store used for rendezvous; empty if the launcher provides its own."""
    hosts: tuple[int, ...] = ()
    """The host of each rank, by index; empty: all ranks are on this one."""

    def host_of(self, rank: int) -> int:
        return self.hosts[rank] if self.hosts else 0

    @property
    def is_first_generation(self) -> bool:
        """Whether the run begins with these workers. Then a path that cannot be written is the user's mistake; in later
        generations it is a machine fault, which does not end the run."""
        return self.generation == 0

    @property
    def is_lead(self) -> bool:
        """Rank 0 reports for the run: only its output is shown to the user."""
        return self.rank == 0
