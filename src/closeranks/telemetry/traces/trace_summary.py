"""Sums up a trace: the operations that took longest, and how long the device had nothing to do. Pure.

``summary.json`` holds the same, for programs. A device is idle while none of its streams runs a kernel or a copy,
counted from its first to its last. A collective that waits for another rank is a kernel that runs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from closeranks.telemetry import formatting
from closeranks.telemetry.traces.rank_trace import RankTrace, TraceEvent

_NUM_TOP = 5
_NUM_SHOWN = 4
"""Ranks whose operations are printed."""


@dataclass(frozen=True, slots=True)
class OpTime:
    """An operation by name. Of one on a CPU it is the time without that of the operations inside it."""

    name: str
    seconds: float
    count: int


@dataclass(frozen=True, slots=True)
class DeviceTime:
    busy_s: float
    idle_s: float
    num_kernels: int
    num_launches: int

    @property
    def idle_share(self) -> float:
        return self.idle_s / max(self.busy_s + self.idle_s, 1e-9)


@dataclass(frozen=True, slots=True)
class RankSummary:
    rank: int
    title: str
    num_steps: int
    seconds: float
    """All traced steps together."""
    phases: dict[str, float]
    """Seconds of each, on the host."""
    device: DeviceTime | None
    """None without an accelerator."""
    top_ops: tuple[OpTime, ...]
    top_kernels: tuple[OpTime, ...]
    is_cut: bool


@dataclass(frozen=True, slots=True)
class TraceSummary:
    first_step: int
    last_step: int
    clock_error_s: float | None
    """At most so far apart are the clocks of two ranks in the trace; None: unknown."""
    ranks: tuple[RankSummary, ...]


def summarize_rank(trace: RankTrace) -> RankSummary:
    header = trace.header
    phases: dict[str, float] = defaultdict(float)
    for span in header.phase_spans():
        phases[span.name] += (span.end_ns - span.begin_ns) / 1e9
    timed = [event for event in trace.events if event.kind == "X"]
    kernels = [event for event in timed if event.category == "kernel"]
    return RankSummary(
        rank=header.rank,
        title=header.title,
        num_steps=len(header.steps),
        seconds=header.seconds,
        phases=dict(phases),
        device=device_time(timed),
        top_ops=_longest((event.name, own_ns) for event, own_ns in own_times(timed)),
        top_kernels=_longest((event.name, event.duration_ns) for event in kernels),
        is_cut=trace.is_cut,
    )


def device_time(events: Iterable[TraceEvent]) -> DeviceTime | None:
    """None if nothing ran on a device."""
    events = list(events)
    spans = sorted((event.begin_ns, event.end_ns) for event in events if event.is_on_device)
    if not spans:
        return None
    busy_ns, until_ns = 0, spans[0][0]
    for begin_ns, end_ns in spans:
        busy_ns += max(0, end_ns - max(begin_ns, until_ns))
        until_ns = max(until_ns, end_ns)
    return DeviceTime(
        busy_s=busy_ns / 1e9,
        idle_s=(until_ns - spans[0][0] - busy_ns) / 1e9,
        num_kernels=sum(event.category == "kernel" for event in events),
        num_launches=sum(
            event.category in ("cuda_runtime", "cuda_driver") and "Launch" in event.name for event in events
        ),
    )


def own_times(events: Iterable[TraceEvent]) -> list[tuple[TraceEvent, int]]:
    """Each operation on a CPU with its time in ns, without that of the operations inside it."""
    tracks: dict[tuple[str, str], list[TraceEvent]] = defaultdict(list)
    for event in events:
        if event.category == "cpu_op":
            tracks[event.track].append(event)
    found: list[tuple[TraceEvent, int]] = []
    for track in tracks.values():
        found += _own_times_in(track)
    return found


def _own_times_in(track: list[TraceEvent]) -> list[tuple[TraceEvent, int]]:
    track.sort(key=lambda event: (event.begin_ns, -event.duration_ns))
    own_ns, around = [event.duration_ns for event in track], list[int]()
    for number, event in enumerate(track):
        while around and track[around[-1]].end_ns <= event.begin_ns:
            around.pop()
        if around:
            own_ns[around[-1]] -= event.duration_ns
        around.append(number)
    return list(zip(track, own_ns, strict=True))


def _longest(times: Iterable[tuple[str, int]]) -> tuple[OpTime, ...]:
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for name, ns in times:
        sums[name][0] += ns
        sums[name][1] += 1
    ordered = sorted(sums.items(), key=lambda item: -item[1][0])[:_NUM_TOP]
    return tuple(OpTime(name, ns / 1e9, count) for name, (ns, count) in ordered)


def summary_lines(summary: TraceSummary) -> list[str]:
    """For people: the first ranks."""
    of_what = "kernels" if any(rank.top_kernels for rank in summary.ranks) else "operations"
    lines = ["", f"The longest phases of each rank, and the {of_what} that took longest, without those inside them:"]
    for rank in summary.ranks[:_NUM_SHOWN]:
        lines += ["", *_rank_lines(rank)]
    if more := summary.ranks[_NUM_SHOWN:]:
        lines += ["", f"{formatting.count(len(more), 'more rank')}: summary.json has their figures."]
    return lines


def _rank_lines(rank: RankSummary) -> list[str]:
    each_s = rank.seconds / rank.num_steps
    title = f"{rank.title}: {formatting.count(rank.num_steps, 'step')} of {formatting.short_duration(each_s)}"
    if rank.device is not None:
        idle, device = formatting.percent(rank.device.idle_share), rank.device
        title += f"; device idle for {idle} of the time, {device.num_kernels / rank.num_steps:.0f} kernels a step"
    if rank.is_cut:
        title += "; its trace was too large and ends early: trace fewer steps"
    return [title, f"  {_phase_line(rank)}", *_op_lines(rank.top_kernels or rank.top_ops, rank)]


def _phase_line(rank: RankSummary) -> str:
    longest = sorted(rank.phases.items(), key=lambda item: -item[1])[:_NUM_TOP]
    return ", ".join(f"{name} {formatting.percent(seconds / max(rank.seconds, 1e-9))}" for name, seconds in longest)


def _op_lines(ops: Sequence[OpTime], rank: RankSummary) -> list[str]:
    lines = []
    for op in ops:
        each, share = op.seconds / rank.num_steps, formatting.percent(op.seconds / max(rank.seconds, 1e-9))
        num = f"{op.count / rank.num_steps:.0f}x"
        lines.append(f"  {formatting.short_duration(each):>8} a step  {share:>6}  {num:>7}  {_shortened(op.name)}")
    return lines


def _shortened(name: str) -> str:
    """Names of kernels are whole C++ signatures."""
    return name if len(name) <= 80 else f"{name[:77]}..."
