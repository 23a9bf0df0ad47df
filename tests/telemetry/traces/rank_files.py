"""Traces of ranks, written as torch and ``rank_tracer`` write them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

BASE_NS = 1_790_857_026_000_000_000
PID = 4711


def event(name: str, begin_us: float, dur_us: float, **more: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": "cpu_op", "name": name, "pid": PID, "tid": PID, "ts": begin_us, "dur": dur_us, **more}


def kernel(name: str, begin_us: float, dur_us: float, stream: int = 7) -> dict[str, Any]:
    return event(name, begin_us, dur_us, cat="kernel", pid=0, tid=stream)


def header(rank: int = 0, **more: Any) -> dict[str, Any]:
    """Steps 5 and 6 of 1 ms each; the first half of each is forward, the rest vote."""
    steps = [[5, BASE_NS, BASE_NS + 10**6], [6, BASE_NS + 10**6, BASE_NS + 2 * 10**6]]
    phases = [[begin + half, name] for _, begin, _ in steps for half, name in ((0, "forward"), (5 * 10**5, "vote"))]
    own = {"request": "asked", "rank": rank, "host": "here", "clock": "one", "place": f"data {rank}"}
    return {**own, "steps": steps, "phases": phases, "instants": [], **more}


def write(path: Path, events: list[dict[str, Any]], own: dict[str, Any] | None = None, **more: Any) -> Path:
    found = {"schemaVersion": 1, "closeranks": own or header(), "baseTimeNanoseconds": BASE_NS, **more}
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt") as file:
        json.dump({**found, "traceEvents": events, "traceName": "x"}, file)
    return path


def merged(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt") as file:
        found: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return found
