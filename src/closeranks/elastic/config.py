"""What can a job say about faults? The table ``[elastic]``.

Invariant: the defaults survive what a process or a host can do, and give up only where going on could not help.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from closeranks.core.config.table import ConfigTable


class ElasticConfig(ConfigTable):
    """How a run detects faults and recovers from them."""

    enabled: bool = True
    """Recover from faults: workers are restarted from snapshots in memory. Off: the first fault ends the run."""
    snapshot_every: Literal["auto"] | Annotated[int, Field(ge=1)] = "auto"
    """Steps between snapshots. "auto": every step, or as rarely as ``snapshot_cost`` requires."""
    snapshot_cost: float = Field(default=0.02, gt=0.0, le=1.0)
    """The share of a step's time that "auto" lets snapshots take."""
    second_copies: Literal["auto", "on", "off"] = "auto"
    """Whether state that only one rank holds is also copied to another rank, on another host if there is one, after
    each snapshot. "auto": unless gradients are compressed or local SGD spans several hosts: these copies, several
    times the model, would load the slow link. Off: what a lost host held is restored from a checkpoint."""
    hang_floor_s: float = Field(default=5.0, gt=0.0)
    """A worker without progress is never declared hung before this long; one stopped by a signal, after at most 2 s."""
    hang_factor: float = Field(default=8.0, ge=1.0)
    """It is declared hung when a phase of its step takes this many times its longest recent duration."""
    first_s: float = Field(default=600.0, gt=0.0)
    """The deadline of a phase that has not been seen yet: opening the data, or a first step, which may compile."""
    stragglers: Literal["report", "rebalance", "evict", "off"] = "report"
    """What to do about a worker that computes slower than the others: report it, also give its data rank fewer
    micro-batches of each step, or also replace it."""
    slow_ratio: float = Field(default=1.5, gt=1.0)
    """A worker that takes this many times the median of the others counts as slow."""
    slow_steps: int = Field(default=20, ge=1)
    """For how many steps in a row it must be slow. With "rebalance", also the steps between two decisions."""
    max_faults: int = Field(default=20, ge=0)
    """The run recovers from this many faults within ``fault_window_s``; one more ends it."""
    fault_window_s: float = Field(default=3600.0, gt=0.0)
    """The time in which faults are counted."""
    max_repeats: int = Field(default=2, ge=1)
    """A fault that ends the same step in the same way this many times is attributed to the code or the data."""
    max_host_faults: int = Field(default=5, ge=1)
    """After this many faults within ``fault_window_s`` a host gets no more workers, if others can take them."""
    min_workers: int = Field(default=1, ge=1)
    """With fewer workers than this the run ends."""
    wait_s: float = Field(default=0.0, ge=0.0)
    """How long to wait for a lost host to come back, or another to join, before continuing with fewer workers."""
