"""How much does a run put up with? The numbers by which the agent notices faults, and by which it gives up.

Plain values: the table ``[elastic]`` belongs to another room, and who starts the agent carries them over. Invariant:
the defaults are that table's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Limits:
    hang_floor_s: float = 5.0
    """A worker that stands still is never given up before this long."""
    hang_factor: float = 8.0
    """It is given up when a phase takes so many times the longest it took lately."""
    first_s: float = 600.0
    """The same for a phase that has not been seen yet."""
    stragglers: Literal["report", "evict", "off"] = "report"
    slow_ratio: float = 1.5
    """How many times the median of the others counts as slow."""
    slow_steps: int = 20
    """For how many steps in a row it must be so."""
    max_faults: int = 20
    """So many faults within ``fault_window_s`` are survived; one more ends the run."""
    fault_window_s: float = 3600.0
    max_repeats: int = 2
    """A fault that ends the same step in the same way so many times is called the code's or the data's."""
    max_host_faults: int = 5
    """After so many faults within ``fault_window_s`` a host gets no workers any more, if others can take them."""
    min_workers: int = 1
    """With fewer workers than this the run ends."""
    wait_s: float = 0.0
    """How long to wait for a lost host, or for another, before going on smaller."""
