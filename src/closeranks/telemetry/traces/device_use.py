"""Reads how long devices are busy in a step, from the summary of a run's newest trace (``trace_summary``)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

_MOST_BYTES = 64 << 20
"""No summary is larger; a file of a run may have come from anywhere."""


def device_busy_s(folder: Path) -> Mapping[int, float]:
    """By rank: the seconds of a traced step in which its device ran something. Empty without a trace, or without
    devices; a summary that cannot be read counts as none."""
    summaries = sorted(folder.glob("traces/step-*/summary.json"))
    if not summaries or summaries[-1].stat().st_size > _MOST_BYTES:
        return {}
    try:
        ranks = json.loads(summaries[-1].read_bytes())["ranks"]
        return {
            int(one["rank"]): float(one["device"]["busy_s"]) / int(one["num_steps"]) for one in ranks if one["device"]
        }
    except (OSError, ValueError, TypeError, KeyError, ArithmeticError, RecursionError):
        return {}
