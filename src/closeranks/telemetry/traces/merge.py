"""Merges the traces of all ranks into one file for Perfetto and chrome://tracing, on one clock.

A rank is a process of the merged trace, with its phases as the first track; below it are the threads and the streams of
the device as torch recorded them. Invariants: one rank's trace is in memory at a time; the file appears whole or not at
all; times count from the beginning of the first traced step.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from closeranks.telemetry.traces.clock_offsets import CONVERSION_NS, ClockOffset, clock_offsets
from closeranks.telemetry.traces.rank_trace import (
    RankTrace,
    TraceDamaged,
    TraceEvent,
    TraceHeader,
    read_header,
    read_rank_trace,
)
from closeranks.telemetry.traces.trace_summary import RankSummary, TraceSummary, summarize_rank

_PHASES_TRACK = 1
_TRACKS_PER_RANK = 10_000
"""Thread numbers are unique in the whole file: viewers confuse threads of one number."""
_FLOWS_PER_RANK = 1 << 32
_COPIED = ("args", "bp")
"""Fields of an event that stay as they are."""


def merge_traces(paths: Mapping[int, Path], out: Path) -> TraceSummary:
    """``OSError`` or ``TraceDamaged`` if one of them cannot be read, or ``out`` not be written."""
    headers = {rank: _of_rank(rank, read_header, path) for rank, path in sorted(paths.items())}
    offsets = clock_offsets(
        {rank: header.clock for rank, header in headers.items()},
        {rank: header.instants for rank, header in headers.items()},
    )
    origin_ns = min(header.steps[0].begin_ns - offsets[rank].offset_ns for rank, header in headers.items())
    unfinished = out.with_name(f".{out.name}")
    try:
        with gzip.open(unfinished, "wt") if out.suffix == ".gz" else unfinished.open("w") as file:
            ranks = _write(file, paths, {rank: origin_ns + one.offset_ns for rank, one in offsets.items()})
        unfinished.replace(out)
    finally:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
    steps = [step.step for header in headers.values() for step in header.steps]
    return TraceSummary(min(steps), max(steps), clock_error_s(offsets), tuple(ranks))


def clock_error_s(offsets: Mapping[int, ClockOffset]) -> float | None:
    """Between any two ranks, the conversion of torch's times included."""
    errors = [one.error_ns for one in offsets.values() if one.error_ns is not None]
    if len(errors) < len(offsets):
        return None
    return (sum(sorted(errors)[-2:]) + CONVERSION_NS) / 1e9


def write_summary(summary: TraceSummary, path: Path) -> None:
    unfinished = path.with_name(f".{path.name}")
    unfinished.write_text(json.dumps(asdict(summary), indent=1) + "\n")
    unfinished.replace(path)


def _of_rank(rank: int, read: Any, path: Path) -> Any:
    try:
        return read(path)
    except TraceDamaged as error:
        raise TraceDamaged(f"the trace of rank {rank} ({path}) cannot be used: {error}") from error


def _write(file: IO[Any], paths: Mapping[int, Path], origins: Mapping[int, int]) -> list[RankSummary]:
    ranks: list[RankSummary] = []
    file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
    separator = ""
    for rank, path in sorted(paths.items()):
        trace = _of_rank(rank, read_rank_trace, path)
        for event in rank_events(trace, origins[rank]):
            file.write(separator + json.dumps(event, separators=(",", ":")))
            separator = ",\n"
        ranks.append(summarize_rank(trace))
    file.write("\n]}\n")
    return ranks


def rank_events(trace: RankTrace, origin_ns: int) -> Iterator[dict[str, Any]]:
    """The events of one rank in the merged trace; ``origin_ns``: its beginning by the rank's clock."""
    tracks = _Tracks(trace)
    rank = trace.header.rank
    yield _named("process_name", rank, 0, trace.header.title)
    yield {"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}}
    for event in trace.events:
        yield _moved(event, rank, tracks.number_of(event), origin_ns)
    yield from _phase_events(trace.header, origin_ns)
    yield from tracks.names()


class _Tracks:
    """Numbers the threads and streams of a rank in the order in which they appear, the phases first."""

    def __init__(self, trace: RankTrace) -> None:
        self._rank, self._recorded = trace.header.rank, trace.track_names
        self._numbers: dict[tuple[str, str], int] = {}
        self._on_device: set[tuple[str, str]] = set()

    def number_of(self, event: TraceEvent) -> int:
        if event.is_on_device:
            self._on_device.add(event.track)
        found = self._numbers.setdefault(event.track, _PHASES_TRACK + 1 + len(self._numbers))
        return track_number(self._rank, found)

    def names(self) -> Iterator[dict[str, Any]]:
        titles = {track_number(self._rank, _PHASES_TRACK): "phases"}
        for (process, thread), number in self._numbers.items():
            title = self._recorded.get((process, thread), f"thread {thread}").strip()
            is_device = (process, thread) in self._on_device
            titles[track_number(self._rank, number)] = f"device {process} {title}" if is_device else title
        for number, title in titles.items():
            yield _named("thread_name", self._rank, number, title)
            sort = {"sort_index": number}
            yield {"ph": "M", "name": "thread_sort_index", "pid": self._rank, "tid": number, "args": sort}


def track_number(rank: int, number: int) -> int:
    return rank * _TRACKS_PER_RANK + number


def _named(what: str, rank: int, track: int, title: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": rank, "tid": track, "args": {"name": title}}


def _moved(event: TraceEvent, rank: int, track: int, origin_ns: int) -> dict[str, Any]:
    moved: dict[str, Any] = {"ph": event.kind, "cat": event.category, "name": event.name, "pid": rank, "tid": track}
    moved["ts"] = (event.begin_ns - origin_ns) / 1000
    if event.kind == "X":
        moved["dur"] = event.duration_ns / 1000
    elif isinstance(number := event.fields.get("id"), int):  # an arrow is found by its number, in the whole file
        moved["id"] = rank * _FLOWS_PER_RANK + number % _FLOWS_PER_RANK
    return moved | {name: event.fields[name] for name in _COPIED if name in event.fields}


def _phase_events(header: TraceHeader, origin_ns: int) -> Iterator[dict[str, Any]]:
    spans: Iterable[tuple[str, str, int, int]] = [
        *(("step", f"step {one.step}", one.begin_ns, one.end_ns) for one in header.steps),
        *(("phase", one.name, one.begin_ns, one.end_ns) for one in header.phase_spans()),
    ]
    track = track_number(header.rank, _PHASES_TRACK)
    for category, name, begin_ns, end_ns in spans:
        where = {"pid": header.rank, "tid": track, "ts": (begin_ns - origin_ns) / 1000}
        yield {"ph": "X", "cat": category, "name": name, **where, "dur": (end_ns - begin_ns) / 1000}
