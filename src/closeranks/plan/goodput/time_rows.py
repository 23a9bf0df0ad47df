"""The rows of a simulated account: where the time of the workers went.

Invariant: a loss that a real run has, too, has the same name and the same words here (``telemetry.goodput``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

USEFUL: Final = "useful"
STRAGGLER: Final = "straggler"
SNAPSHOT: Final = "snapshot"
SAVE: Final = "save"
REDONE: Final = "redone"
DETECTION: Final = "detection"
RECOVERY: Final = "recovery"
WAITING: Final = "waiting"
MISSING: Final = "missing"

ROW_WORDS: Final[Mapping[str, str]] = {
    USEFUL: "useful: steps that count",
    STRAGGLER: "waiting for the slowest rank",
    SNAPSHOT: "snapshots",
    SAVE: "saves",
    REDONE: "steps redone, and cut short by a fault",
    DETECTION: "detecting faults",
    RECOVERY: "recovery",
    WAITING: "waiting for hosts",
    MISSING: "workers missing while the others train",
}
"""Every row, in the order in which they are shown."""
