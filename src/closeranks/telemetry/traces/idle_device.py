"""Reads how long devices were idle, from what the newest trace of a run was summed up to (``trace_summary``)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_MOST_BYTES = 64 << 20
"""No summary is larger; a file of a run may have come from anywhere."""


def idle_shares(folder: Path) -> Mapping[int, float]:
    """By rank: the share of the traced time in which its device had nothing to do. Empty without a trace, or without
    devices; a summary that cannot be read counts as none."""
    summaries = sorted(folder.glob("traces/step-*/summary.json"))
    if not summaries or summaries[-1].stat().st_size > _MOST_BYTES:
        return {}
    try:
        ranks = json.loads(summaries[-1].read_bytes())["ranks"]
        return {int(one["rank"]): _idle_share(one["device"]) for one in ranks if one["device"]}
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return {}


def _idle_share(device: Mapping[str, Any]) -> float:
    busy_s, idle_s = float(device["busy_s"]), float(device["idle_s"])
    return idle_s / max(busy_s + idle_s, 1e-9)
