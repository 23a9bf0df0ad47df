"""What can go wrong in a cluster, as values: the same chaos gives the same run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """``crash`` (and start again), ``hang`` (of the agent alone), ``cut`` (of its network), ``deaf`` (agents do not
    reach it, its workers still reach the others'), ``fault`` (of a worker) or ``leave``."""

    at: float
    kind: str
    host: int
    lasts: float


@dataclass(frozen=True)
class Chaos:
    """What goes wrong in a run, all of it."""

    seed: int
    num_hosts: int = 3
    num_contenders: int = 1
    lead_works: bool = True
    """Whether the lead's host takes workers; where it does not, its own fence ends nothing."""
    most_members: int = 99
    """The others are spares: when all members are out of reach at once, the next generation need not wait for them."""
    loss: float = 0.0
    repeat: float = 0.0
    delay_s: float = 0.05
    late: float = 0.0
    """The share of messages that take up to ``late_s``."""
    late_s: float = 4.0
    faults: tuple[Fault, ...] = ()
    chaos_s: float = 30.0
    calm_s: float = 35.0
