"""Reads what a run's ranks and hosts used, and what their memory was used for. Pure but for ``load_resources``.

Invariant: figures of a host are recorded by one rank of it, so nothing counts twice.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

from closeranks.core.events import Event, MemoryUsed, Resources, decode
from closeranks.telemetry.run_log.recorder import parse_line
from closeranks.telemetry.run_log.run_folder import RunFolder
from closeranks.telemetry.run_log.step_reader import RankLog, other_logs

_RANKS_READ = 64
"""Reading every file of a large run would take minutes; the first ranks of the run and of their hosts are enough."""
_RECORD, _MEMORY = (f'"event": "{kind.name}"'.encode() for kind in (Resources, MemoryUsed))


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
    measured: Mapping[int, tuple[MemoryUsed, ...]] = field(default_factory=dict)
    """By rank: all measurements, in the order of their steps, the last one of each step."""
    share: float = 1.0
    """Of the records of a long run, what was read, evenly spread."""

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
    measured: dict[int, dict[int, MemoryUsed]] = {}
    for rank, at, event in events:
        if isinstance(event, Resources) and _is_finite(event):
            records.append(RecordedResources(rank, at, event))
        elif isinstance(event, MemoryUsed):
            memory[rank] = event
            measured.setdefault(rank, {})[event.step] = event
    in_order = {rank: tuple(own[step] for step in sorted(own)) for rank, own in measured.items()}
    return ResourceHistory(tuple(records), memory, in_order)


def _is_finite(used: Resources) -> bool:
    """No sampler wrote anything else, but a file may have come from anywhere."""
    groups = (used.process, used.cgroup, used.host_wide, used.gpu, used.link_bytes_per_s)
    return all(math.isfinite(value) for value in (used.seconds, *chain.from_iterable(map(dict.values, groups))))


def load_resources(folder: Path) -> ResourceHistory:
    """What is in a run folder; empty if nothing was recorded."""
    run = RunFolder(folder)
    logs = (RankLog(run.metrics(0)), *other_logs(run, run.other_metrics()[: _RANKS_READ - 1]))
    counts = _RecordCounts()
    history = collect(one for log in logs for one in _events_in(log, counts))
    return replace(history, share=counts.num_read / counts.num if counts.num else 1.0)


@dataclass(slots=True)
class _RecordCounts:
    num: int = 0
    num_read: int = 0


def _events_in(log: RankLog, counts: _RecordCounts) -> Iterator[tuple[int, float, Event]]:
    """All events about memory, and all records; of a long run the first record in each block."""
    for stretch in log.stretches("samples", "others", num_samples=0):
        num_before = counts.num
        for line in stretch.lines:
            if _RECORD in line:
                counts.num += 1
                if stretch.block is not None and counts.num > num_before + 1:
                    continue
                counts.num_read += 1
            elif _MEMORY not in line:
                continue
            if (fields := parse_line(line)) is not None and (event := decode(fields)) is not None:
                yield int(fields.get("rank", 0)), float(fields.get("at", 0.0)), event
