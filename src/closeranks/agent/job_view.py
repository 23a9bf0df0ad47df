"""A read-only view of a job at one moment, for status displays and fault injection.

Invariant: plain values only, so that its readers cannot hold or change anything of the agent.
"""

from __future__ import annotations

from dataclasses import dataclass

from closeranks.agent.detection.progress import WorkerProgress


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker."""

    rank: int
    host: str
    pid: int | None
    """None before its fork, and for a worker of another host."""
    progress: WorkerProgress
    local_rank: int = 0
    """Index of its snapshot memory."""


@dataclass(frozen=True, slots=True)
class HostView:
    """One host of the job."""

    name: str
    num_workers: int
    """Its capacity."""
    state: str
    """``member``, ``ready``, ``leaving``, ``lost`` or ``quarantined``."""


@dataclass(frozen=True, slots=True)
class JobView:
    now: float
    """``time.monotonic()``"""
    state: str
    """``starting``, ``running``, ``closing ranks`` or ``stopping``."""
    generation: int
    world_size: int
    local_workers: tuple[WorkerView, ...]
    """The workers of this host, in rank order."""
    hosts: tuple[HostView, ...]
    snapshot_paths: tuple[tuple[str, ...], ...]
    """Paths of this host's snapshot memory: for each worker its own two and its peer's two."""
    snapshot_bytes: int
    zygote: int | None = None
    """The process that workers are forked from."""
    remote_workers: tuple[WorkerView, ...] = ()
    """The workers of other hosts, as their hosts last reported."""
