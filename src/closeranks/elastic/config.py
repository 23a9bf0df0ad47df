"""What can a job say about faults? The table ``[elastic]``.

Invariant: the defaults survive what a process or a host can do, and give up only where going on could not help.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from closeranks.core.config.table import ConfigTable


class ElasticConfig(ConfigTable):
    """How a run notices faults and goes on after them."""

    enabled: bool = True
    """Go on after a fault: workers are started anew from memory. Off, the first fault ends the run."""
    snapshot_every: Literal["auto"] | Annotated[int, Field(ge=1)] = "auto"
    """Steps between copies of the state in memory. "auto": every step, or as many as keep their cost in bounds."""
    snapshot_cost: float = Field(default=0.02, gt=0.0, le=1.0)
    """The share of a step that "auto" lets the copies take."""
    second_copies: Literal["auto", "on", "off"] = "auto"
    """Whether what one rank alone holds is copied to another, on another host where there is one, after every copy of
    its own. "auto": unless gradients travel compressed or replicas train apart on several hosts: such copies, several
    times the model, would take the link that was to be spared. Off, what a lost host held comes from a checkpoint."""
    hang_floor_s: float = Field(default=5.0, gt=0.0)
    """A worker that stands still is never given up before this long; one that is stopped, after 2 s at the latest."""
    hang_factor: float = Field(default=8.0, ge=1.0)
    """It is given up when a phase of its step takes so many times the longest it took lately."""
    first_s: float = Field(default=600.0, gt=0.0)
    """The same for a phase that has not been seen yet: opening the data, a first step, which may compile."""
    stragglers: Literal["report", "evict", "off"] = "report"
    """What to do about a worker that computes slower than the others: say so, or replace it as well."""
    slow_ratio: float = Field(default=1.5, gt=1.0)
    """How many times the median of the others counts as slow."""
    slow_steps: int = Field(default=20, ge=1)
    """For how many steps in a row it must be so."""
    max_faults: int = Field(default=20, ge=0)
    """So many faults within ``fault_window_s`` are survived; one more ends the run."""
    fault_window_s: float = Field(default=3600.0, gt=0.0)
    """The time in which faults are counted."""
    max_repeats: int = Field(default=2, ge=1)
    """A fault that ends the same step in the same way so many times is called the code's or the data's."""
    max_host_faults: int = Field(default=5, ge=1)
    """After so many faults within ``fault_window_s`` a host gets no workers any more, if others can take them."""
    min_workers: int = Field(default=1, ge=1)
    """With fewer workers than this the run ends, rather than going on smaller."""
    wait_s: float = Field(default=0.0, ge=0.0)
    """How long to wait for a lost host to come back, or another to join, before going on smaller."""
