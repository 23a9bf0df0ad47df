"""What had a run cost at each moment, and what of it was lost to faults? Sessions in, a line in time out. Pure.

Time is that of the run: what lies between two commands is cut out. Invariant: the last point has the sums of the
account. Recovery comes at the beginning of a session; steps that are done again, and the time until a fault is
detected, at its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from closeranks.telemetry.goodput.run_account import SessionAccount
from closeranks.telemetry.goodput.time_account import DETECTION, RECOVERY, REDONE


class SpendingPoint(NamedTuple):
    wall_s: float
    worker_s: float
    lost_s: float
    """Of ``worker_s``, what faults cost."""
    is_fault: bool = False
    """Whether a fault was noticed here."""


def spending(sessions: Sequence[SessionAccount]) -> list[SpendingPoint]:
    """Points with straight lines between them."""
    points = [SpendingPoint(0.0, 0.0, 0.0)]
    for span, rows in sessions:
        whole_s, worker_s = span.end - span.begin, sum(rows.values())
        if whole_s <= 0 or worker_s <= 0:
            continue
        lead_s = max(0.0, rows.get(RECOVERY, 0.0))
        tail_s = max(0.0, rows.get(DETECTION, 0.0) + rows.get(REDONE, 0.0))
        wall_s, spent_s, lost_s = points[-1][:3]
        for share, lost in (
            (min(1.0, lead_s / worker_s), lost_s + lead_s),
            (max(0.0, 1 - tail_s / worker_s), lost_s + lead_s),
            (1.0, lost_s + lead_s + tail_s),
        ):
            points.append(SpendingPoint(wall_s + share * whole_s, spent_s + share * worker_s, lost))
        if span.num_faults:
            points[-1] = points[-1]._replace(is_fault=True)
    return points
