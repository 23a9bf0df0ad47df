"""Reads what a run's ranks and hosts used, and what their memory was used for. Pure but for ``load_resources``.

Invariant: figures of a host are recorded by one rank of it, so nothing counts twice.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from closeranks.core.events import Event, MemoryUsed, Resources, decode
from closeranks.telemetry.run_log.recorder import lines_of, parse_line
from closeranks.telemetry.run_log.run_folder import RunFolder

_RANKS_READ = 64
"""Reading every file of a large run would take minutes; the first ranks of the run and of their hosts are enough."""
_MARKS = tuple(f'"event": "{kind.name}"'.encode() for kind in (Resources, MemoryUsed))


@dataclass(frozen=True, slots=True)
class RecordedResources:
    """``used``: since ``at`` minus its length, on the wall clock."""

    rank: int
    at: float
    used: Resources


@dataclass(frozen=True, slots=True)
class ResourceHistory:
    """In the order of the ranks, and of each rank's records."""

    records: tuple[RecordedResources, ...] = ()
    memory: Mapping[int, MemoryUsed] = field(default_factory=dict)
    """By rank: as measured last."""

    def values(self, select: Callable[[Resources], float | None]) -> list[tuple[float, int]]:
        """A figure of every record that has it, with its rank."""
        return [(value, one.rank) for one in self.records if (value := select(one.used)) is not None]

    def neighbour_cpus(self) -> list[float]:
        """Processors of a host that were busy with something else than the run's workers and their children: what the
        host says, minus what each rank on it said nearest in time."""
        ranks: dict[int, dict[int, list[RecordedResources]]] = {}
        for one in self.records:
            ranks.setdefault(one.used.host_number, {}).setdefault(one.rank, []).append(one)
        found = []
        for one in self.records:
            if "cpus" in one.used.host_wide:
                nearest = (_nearest(own, one.at) for own in ranks[one.used.host_number].values())
                ours = sum(other.used.process.get("cpus", 0.0) for other in nearest)
                found.append(max(0.0, one.used.host_wide["cpus"] - ours))
        return found


def _nearest(records: list[RecordedResources], at: float) -> RecordedResources:
    index = bisect_left(records, at, key=lambda one: one.at)
    return min(records[max(0, index - 1) : index + 1], key=lambda one: abs(one.at - at))


def collect(events: Iterable[tuple[int, float, Event]]) -> ResourceHistory:
    """``events``: each with its rank and time, in the order of their recording."""
    records: list[RecordedResources] = []
    memory: dict[int, MemoryUsed] = {}
    for rank, at, event in events:
        if isinstance(event, Resources) and _is_finite(event):
            records.append(RecordedResources(rank, at, event))
        elif isinstance(event, MemoryUsed):
            memory[rank] = event
    return ResourceHistory(tuple(records), memory)


def _is_finite(used: Resources) -> bool:
    """No sampler wrote anything else, but a file may have come from anywhere."""
    groups = (used.process, used.cgroup, used.host_wide, used.gpu)
    return all(math.isfinite(value) for value in (used.seconds, *chain.from_iterable(map(dict.values, groups))))


def load_resources(folder: Path) -> ResourceHistory:
    """What is in a run folder; empty if nothing was recorded."""
    run = RunFolder(folder)
    paths = (run.metrics(0), *run.other_metrics()[: _RANKS_READ - 1])
    return collect(one for path in paths for one in _events_in(path))


def _events_in(path: Path) -> Iterator[tuple[int, float, Event]]:
    for line in lines_of(path):
        if any(mark in line for mark in _MARKS) and (fields := parse_line(line)) is not None:
            event = decode(fields)
            if event is not None:
                yield int(fields.get("rank", 0)), float(fields.get("at", 0.0)), event
