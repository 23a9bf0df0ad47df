"""Formats durations: for people, and as values of a job file.

Invariant: only significant digits; what ``duration_literal`` writes is read back as the same duration to within a
hundredth of it.
"""

from __future__ import annotations

import math

_MINUTE, _HOUR, _DAY = 60.0, 3600.0, 86400.0


def format_duration(seconds: float) -> str:
    """0.05 s, 9.3 s, 54 s, 90 s, 2.5 min, 8 h, 42 days."""
    if not math.isfinite(seconds):
        return "forever"
    most_s = 59.5 if seconds % _MINUTE == 0 else 99.5
    for limit, unit, name in ((most_s, 1.0, "s"), (59.5 * _MINUTE, _MINUTE, "min"), (72 * _HOUR, _HOUR, "h")):
        if seconds < limit:
            return f"{_short(seconds / unit)} {name}"
    return f"{_short(seconds / _DAY)} days"


def duration_literal(seconds: float) -> str:
    """The value for a job file: 54s, 90s, 15min, 3h; in the largest unit of which it is a whole number."""
    for unit, name in ((_HOUR, "h"), (_MINUTE, "min")):
        if seconds >= unit and math.isclose(seconds % unit, 0.0, abs_tol=1e-9):
            return f"{seconds / unit:.0f}{name}"
    return f"{seconds:.0f}s" if seconds >= 100 else f"{seconds:.3g}s"


def _short(value: float) -> str:
    """Two significant digits, and all digits before the decimal point."""
    if value >= 9.95:
        return f"{value:,.0f}"
    return f"{value:.2g}" if value >= 0.001 or value == 0 else f"{value:.0e}"
