"""Workers of one host, all of a world, and how they ended."""

from __future__ import annotations

from closeranks.agent.workers.worker_group import WorkerGroup
from closeranks.core.world import World


def worlds_here(size: int, generation: int) -> list[World]:
    """All ranks on this host."""
    return [World(rank, size, rank, size, launcher="agent", generation=generation) for rank in range(size)]


def statuses(group: WorkerGroup) -> dict[int, int]:
    """Of those that have ended, by rank."""
    return {worker.rank: worker.status for worker in group.worker_reports() if worker.status is not None}
