"""Reads the trace of one rank, as ``rank_tracer`` wrote it.

Invariants: times come out as whole nanoseconds of the rank's clock, since a microsecond of Unix time does not fit into
a float with the digits that matter; nothing in the file is trusted, and what is no event is left out.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from closeranks.core.dataclass_fields import checked_fields
from closeranks.core.system.regular_file import open_binary
from closeranks.telemetry.traces.trace_file import IS_CUT, METADATA, MOST_BYTES

_MOST_HEADER_BYTES = 16 << 20
_EVENTS = b'"traceEvents"'
_DEVICE_KINDS = ("kernel", "gpu_memcpy", "gpu_memset")
_FAR_US = 1e18

Json = Mapping[str, Any]


class TraceDamaged(ValueError):
    """The file is no trace of ours, or not all of one."""


@dataclass(frozen=True, slots=True)
class TracedStep:
    step: int
    begin_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class PhaseSpan:
    """A phase within one step, without interruption."""

    step: int
    name: str
    begin_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class TraceHeader:
    """What a rank added to its trace."""

    request: str
    rank: int
    host: str
    clock: str
    place: str
    steps: tuple[TracedStep, ...]
    phases: tuple[tuple[int, str], ...]
    instants: tuple[tuple[int, int], ...]
    base_ns: int
    """What the times of the events are counted from."""

    @property
    def title(self) -> str:
        return f"rank {self.rank} ({', '.join(filter(None, (f'host {self.host}', self.place)))})"

    @property
    def seconds(self) -> float:
        return (self.steps[-1].end_ns - self.steps[0].begin_ns) / 1e9

    def phase_spans(self) -> Iterator[PhaseSpan]:
        """The phases of every step, which add up to it."""
        ends = [at for at, _ in self.phases[1:]] + [self.steps[-1].end_ns]
        for step in self.steps:
            for (begin, name), end in zip(self.phases, ends, strict=True):
                if (first := max(begin, step.begin_ns)) < (last := min(end, step.end_ns)):
                    yield PhaseSpan(step.step, name, first, last)


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """An event that takes time, or one end of an arrow between two of them."""

    kind: str
    """As in the format: ``X``, or ``s``, ``t`` or ``f``."""
    category: str
    name: str
    track: tuple[str, str]
    """Process and thread, or device and stream."""
    begin_ns: int
    duration_ns: int
    fields: Json

    @property
    def end_ns(self) -> int:
        return self.begin_ns + self.duration_ns

    @property
    def is_on_device(self) -> bool:
        return self.category in _DEVICE_KINDS


@dataclass(frozen=True, slots=True)
class RankTrace:
    header: TraceHeader
    events: Sequence[TraceEvent]
    track_names: Mapping[tuple[str, str], str]
    is_cut: bool
    """Whether it would have been too large, and ends early."""


def read_header(path: Path) -> TraceHeader:
    """What comes before the events. ``TraceDamaged``, or ``OSError`` if it cannot be read."""
    head = _read(path, _MOST_HEADER_BYTES, until=_EVENTS)
    before, found, _ = head.partition(_EVENTS)
    if not found:
        raise TraceDamaged("it has no events")
    return _header(_parse(before + _EVENTS + b": []}"))


def read_rank_trace(path: Path) -> RankTrace:
    """All of it, at some 3 KB of memory for each event."""
    values = _parse(_read(path, MOST_BYTES + _MOST_HEADER_BYTES))
    header, found = _header(values), values.get("traceEvents")
    listed = [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []
    events = tuple(event for one in listed if (event := _event(one, header.base_ns)) is not None)
    return RankTrace(header, events, _track_names(listed), bool(values.get(IS_CUT)))


def _read(path: Path, most_bytes: int, until: bytes = b"") -> bytes:
    """``until``: stop once this was read."""
    content = bytearray()
    try:
        with open_binary(path) as packed, gzip.open(packed) as file:
            while chunk := file.read(1 << 20):
                content += chunk
                if until and until in content:
                    break
                if len(content) > most_bytes:
                    raise TraceDamaged(f"it has more than {most_bytes:,} bytes")
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceDamaged(str(error)) from error
    return bytes(content)


def _parse(content: bytes) -> Json:
    try:
        values = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise TraceDamaged(f"it is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise TraceDamaged("it is not an object")
    return values


def _header(values: Json) -> TraceHeader:
    own, base_ns = values.get(METADATA), values.get("baseTimeNanoseconds", 0)
    try:
        if not isinstance(own, dict) or type(base_ns) is not int:
            raise TypeError("it does not say which rank it is of")
        steps = tuple(TracedStep(*map(_whole, one)) for one in own["steps"])
        phases = tuple((_whole(at), str(name)) for at, name in own["phases"])
        instants = tuple((_whole(enter), _whole(leave)) for enter, leave in own["instants"])
        words = checked_fields(TraceHeader, {name: own[name] for name in ("request", "rank", "host", "clock", "place")})
    except (TypeError, ValueError, KeyError) as error:
        raise TraceDamaged(f"its header is damaged: {error}") from error
    if not steps or not phases:
        raise TraceDamaged("it has no steps")
    return TraceHeader(**words, steps=steps, phases=phases, instants=instants, base_ns=base_ns)


def _whole(value: object) -> int:
    if type(value) is not int:
        raise TypeError(f"{str(value)[:40]!r} is not a whole number")
    return value


def _event(one: Json, base_ns: int) -> TraceEvent | None:
    kind, name, at_ns, duration_ns = one.get("ph"), one.get("name"), _ns(one.get("ts")), _ns(one.get("dur", 0))
    if kind not in ("X", "s", "t", "f") or not isinstance(name, str) or one.get("cat") == "Trace":
        return None
    if at_ns is None or duration_ns is None:
        return None
    return TraceEvent(kind, str(one.get("cat", "")), name, _track(one), base_ns + at_ns, max(0, duration_ns), one)


def _ns(microseconds: object) -> int | None:
    """None for what is no time."""
    if not isinstance(microseconds, int | float) or not abs(microseconds) < _FAR_US:
        return None
    return round(microseconds * 1000)


def _track(one: Json) -> tuple[str, str]:
    return str(one.get("pid")), str(one.get("tid"))


def _track_names(listed: Sequence[Json]) -> dict[tuple[str, str], str]:
    named = (one for one in listed if one.get("ph") == "M" and one.get("name") == "thread_name")
    return {
        _track(one): str(args["name"]) for one in named if isinstance(args := one.get("args"), dict) and "name" in args
    }
