"""Where did the time of a run's workers go? The account of it, as a value.

Invariant: the rows add up to ``worker_s``, workers times wall time. What nothing explains is a row of its own,
``unaccounted``, which is negative if more was measured than there was.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

USEFUL: Final = "useful"
START: Final = "start"
COMPILE: Final = "compile"
DATA: Final = "data"
STRAGGLER: Final = "straggler"
SNAPSHOT: Final = "snapshot"
SAVE: Final = "save"
EVALUATION: Final = "evaluation"
GC: Final = "gc"
USER_CODE: Final = "user_code"
SKIPPED: Final = "skipped"
REDONE: Final = "redone"
DETECTION: Final = "detection"
RECOVERY: Final = "recovery"
END: Final = "end"
UNACCOUNTED: Final = "unaccounted"

ROW_WORDS: Final[Mapping[str, str]] = {
    USEFUL: "useful: steps that count",
    START: "starting, until the first step",
    COMPILE: "compiling",
    DATA: "waiting for data",
    STRAGGLER: "waiting for the slowest rank",
    SNAPSHOT: "snapshots",
    SAVE: "saves",
    EVALUATION: "evaluation",
    GC: "garbage collection",
    USER_CODE: "hooks and your own loop",
    SKIPPED: "skipped steps (not finite)",
    REDONE: "steps redone, and cut short by a fault",
    DETECTION: "detecting faults",
    RECOVERY: "recovery",
    END: "ending, after the last step",
    UNACCOUNTED: "unaccounted",
}
"""Every row, in the order in which they are shown."""
IN_PHASES: Final = (COMPILE, DATA, SNAPSHOT, SAVE, EVALUATION, GC, USER_CODE)
"""Losses that are phases of a step under the same name (``core.phases``)."""


@dataclass(frozen=True, slots=True)
class TimeAccount:
    """All commands and generations of one run, up to its end or to the last event so far."""

    rows: dict[str, float] = field(default_factory=dict)
    """Worker-seconds by row (``ROW_WORDS``)."""
    worker_s: float = 0.0
    """Workers times wall time, from the start of each command to the end of its workers."""
    wall_s: float = 0.0
    """The same for one worker; the time between two commands is not in it."""
    num_steps: int = 0
    """Steps that count: each once, and taken."""
    num_samples: int = 0
    num_items: int = 0
    """Of these steps."""
    num_redone: int = 0
    """Finished steps that had to be done again."""
    num_launches: int = 0
    num_faults: int = 0
    num_ranks: int = 0
    num_read: int = 0
    """Ranks whose records were read; the others are taken to be like them."""
    energy_j: float | None = None
    """Of the accelerators, where it was measured."""

    @property
    def goodput(self) -> float | None:
        """Useful step time as a share of workers times wall time."""
        return self.rows.get(USEFUL, 0.0) / self.worker_s if self.worker_s > 0 else None

    @property
    def device_hours(self) -> float:
        """Each worker has one device, or on a CPU none of its own."""
        return self.worker_s / 3600

    def losses(self) -> dict[str, float]:
        """All rows but the useful one that are not zero, in the order in which they are shown."""
        return {name: self.rows[name] for name in ROW_WORDS if name != USEFUL and self.rows.get(name)}


def merged(earlier: TimeAccount, later: TimeAccount, *, num_redone: int = 0) -> TimeAccount:
    """Two commands of one run. ``num_redone``: steps of the earlier one that the later one does again; each is taken to
    have been as long as its average step."""
    share = min(1.0, num_redone / earlier.num_steps) if earlier.num_steps else 0.0
    lost_s = share * earlier.rows.get(USEFUL, 0.0)
    rows = {name: earlier.rows.get(name, 0.0) + later.rows.get(name, 0.0) for name in ROW_WORDS}
    rows[USEFUL] -= lost_s
    rows[REDONE] += lost_s
    energies = [one.energy_j for one in (earlier, later) if one.energy_j is not None]
    return TimeAccount(
        rows=rows,
        worker_s=earlier.worker_s + later.worker_s,
        wall_s=earlier.wall_s + later.wall_s,
        num_steps=round((1 - share) * earlier.num_steps) + later.num_steps,
        num_samples=round((1 - share) * earlier.num_samples) + later.num_samples,
        num_items=round((1 - share) * earlier.num_items) + later.num_items,
        num_redone=earlier.num_redone + later.num_redone + round(share * earlier.num_steps),
        num_launches=earlier.num_launches + later.num_launches,
        num_faults=earlier.num_faults + later.num_faults,
        num_ranks=max(earlier.num_ranks, later.num_ranks),
        num_read=max(earlier.num_read, later.num_read),
        energy_j=sum(energies) if energies else None,
    )
