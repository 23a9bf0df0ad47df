"""Fault limits: the numbers by which the agent detects faults, and by which it gives up a run.

Plain values: the table ``[elastic]`` belongs to another package, and the caller that starts the agent copies them.
Invariant: the defaults are those of that table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class FaultLimits:
    hang_floor_s: float = 5.0
    """A worker is never declared hung before this long."""
    hang_factor: float = 8.0
    """It is declared hung when a phase takes this many times its longest recent duration."""
    first_s: float = 600.0
    """The deadline of a phase that has not been seen yet."""
    stragglers: Literal["report", "rebalance", "evict", "off"] = "report"
    slow_ratio: float = 1.5
    """A worker that takes this many times the median of the others counts as slow."""
    slow_steps: int = 20
    """For how many steps in a row a rank must be slow."""
    max_faults: int = 20
    """The run recovers from this many faults within ``fault_window_s``; one more ends it."""
    fault_window_s: float = 3600.0
    max_repeats: int = 2
    """A fault that ends the same step in the same way this many times is attributed to the code or the data."""
    max_host_faults: int = 5
    """After this many faults within ``fault_window_s`` a host gets no more workers, if others can take them."""
    min_workers: int = 1
    """With fewer workers than this the run ends."""
    wait_s: float = 0.0
    """How long to wait for a lost host, or for another, before continuing with fewer workers."""
