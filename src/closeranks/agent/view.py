"""What can somebody see who looks over the agent's shoulder?

Values alone, taken at one moment: whoever shows a status or strikes a worker on purpose needs no more, and can hold
nothing of the agent's.
"""

from __future__ import annotations

from dataclasses import dataclass

from closeranks.agent.progress import Progress


@dataclass(frozen=True, slots=True)
class Seen:
    """One worker."""

    rank: int
    host: str
    pid: int | None
    """None before its fork, and for one of another host."""
    progress: Progress
    local_rank: int = 0
    """The number of its box."""


@dataclass(frozen=True, slots=True)
class HostSeen:
    """One host of the job."""

    name: str
    num_workers: int
    """How many it can take."""
    state: str
    """``member``, ``ready``, ``joining``, ``leaving``, ``lost`` or ``quarantined``."""


@dataclass(frozen=True, slots=True)
class View:
    now: float
    """``time.monotonic()``"""
    state: str
    """``starting``, ``running``, ``closing ranks`` or ``stopping``."""
    generation: int
    world_size: int
    seen: tuple[Seen, ...]
    """The workers of this host, in the order of their ranks."""
    hosts: tuple[HostSeen, ...]
    boxes: tuple[tuple[str, ...], ...]
    """Paths of this host's memory for copies of the state: of every worker its own two and its peer's two."""
    boxes_bytes: int
    zygote: int | None = None
    """The process that workers are forked from."""
    elsewhere: tuple[Seen, ...] = ()
    """The workers of other hosts, as their hosts told last."""
