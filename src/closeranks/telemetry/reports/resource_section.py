"""Writes the section of a report about processors, memory, disks, network and GPU. Pure: a history in, markdown out.

A figure that was not recorded has no row, and neither has one that never was high enough to matter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from closeranks.core.events import MemoryUsed, Resources
from closeranks.telemetry import formatting
from closeranks.telemetry.run_log.resource_history import ResourceHistory

_UNEVEN = 1.1
"""The rank with the highest value is named if that is so many times the median."""
KIND_WORDS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "buffers": "other state",
    "activations": "activations",
    "workspace": "workspace and communication",
    "snapshots": "snapshots, on the host",
}
"""Every kind of memory, in the order in which they are shown."""


@dataclass(frozen=True, slots=True)
class _Row:
    label: str
    group: str
    name: str
    show: Callable[[float], str]
    is_total: bool = False
    """Shown per second."""
    least: float = 0.0
    """Left out if it never was as high."""

    def of(self, used: Resources) -> float | None:
        value: float | None = getattr(used, self.group).get(self.name)
        if value is None or not self.is_total:
            return value
        return value / used.seconds if used.seconds > 0 else None


def _number(value: float) -> str:
    return f"{value:.3g}"


def _whole(value: float) -> str:
    return f"{value:.0f}"


def _per_second(value: float) -> str:
    return f"{value:.3g} a second"


_ANY, _SHARE, _BYTES_PER_S = 1e-9, 0.05, 1e6
"""From which height on a figure matters: any, a share of the time, or a rate of bytes."""
_ROWS = (
    _Row("processors, a worker", "process", "cpus", _number),
    _Row("a worker's main thread waits for a processor", "process", "run_wait_share", formatting.percent),
    _Row("and for a disk", "process", "io_wait_share", formatting.percent, least=_SHARE),
    _Row("preemptions, a worker", "process", "preemptions", _per_second, is_total=True, least=100),
    _Row("memory, a worker", "process", "rss_bytes", formatting.size),
    _Row("of it swapped out", "process", "swapped_bytes", formatting.size, least=_ANY),
    _Row("major page faults, a worker", "process", "major_faults", _per_second, is_total=True, least=1),
    _Row("a worker reads", "process", "read_call_bytes", formatting.byte_rate, is_total=True, least=_BYTES_PER_S),
    _Row("of it from disks", "process", "read_bytes", formatting.byte_rate, is_total=True, least=_BYTES_PER_S),
    _Row("processors, the whole host", "host_wide", "cpus", _number),
    _Row("stolen by the hypervisor", "host_wide", "steal_cpus", _number, least=_SHARE),
    _Row("page cache of the host", "host_wide", "page_cache_bytes", formatting.size),
    _Row("swapped in", "host_wide", "swap_in_bytes", formatting.byte_rate, is_total=True, least=_ANY),
    _Row("swapped out", "host_wide", "swap_out_bytes", formatting.byte_rate, is_total=True, least=_ANY),
    _Row("disks: read", "host_wide", "disk_read_bytes", formatting.byte_rate, is_total=True, least=_BYTES_PER_S),
    _Row("disks: written", "host_wide", "disk_write_bytes", formatting.byte_rate, is_total=True, least=_BYTES_PER_S),
    _Row("the busiest disk was busy", "host_wide", "disk_busy_share", formatting.percent, least=_SHARE),
    _Row("network: sent", "host_wide", "net_sent_bytes", formatting.byte_rate, is_total=True, least=_BYTES_PER_S),
    _Row(
        "network: received", "host_wide", "net_received_bytes", formatting.byte_rate, is_total=True, least=_BYTES_PER_S
    ),
    _Row("TCP segments sent again", "host_wide", "net_retransmits", _per_second, is_total=True, least=10),
    _Row("GPU utilisation", "gpu", "utilization", formatting.percent),
    _Row("GPU clock (MHz)", "gpu", "sm_clock_mhz", _whole),
    _Row("GPU power (W)", "gpu", "power_w", _whole),
    _Row("GPU temperature (°C)", "gpu", "temperature_c", _whole),
    _Row("NVLink: sent", "gpu", "nvlink_sent_bytes", formatting.byte_rate, is_total=True, least=_BYTES_PER_S),
    _Row("PCIe: sent", "gpu", "pcie_sent_bytes", formatting.byte_rate, is_total=True, least=_BYTES_PER_S),
    _Row("PCIe: received", "gpu", "pcie_received_bytes", formatting.byte_rate, is_total=True, least=_BYTES_PER_S),
)


def resource_section(history: ResourceHistory, plot: str = "") -> str:
    """A table of medians and highest values; before it the ``plot`` of memory, and what slowed the run from outside.
    Empty if nothing was recorded."""
    rows = [row for row in _rows(history) if row]
    notes = [f"- {note}" for note in (*_notes(history), *_memory_notes(history))]
    if not rows and not notes:
        return ""
    table = ["| | median | highest | |", "|---|---|---|---|", *rows] if rows else []
    picture = ["", f"![Memory by kind, over the run and for each rank]({plot})"] if plot else []
    return "\n".join(["## Resources", *picture, *([""] if notes else []), *notes, *([""] if rows else []), *table])


def _rows(history: ResourceHistory) -> Iterator[str]:
    num_ranks = len({one.rank for one in history.records})
    for row in _ROWS:
        values = history.values(row.of)
        if values and max(values)[0] >= row.least:
            yield _line(row.label, values, row.show, num_ranks)
        if (row.group, row.name) == ("host_wide", "cpus") and values:
            others = [(value, 0) for value in history.neighbour_cpus()]
            yield _line("of them other programs", others, row.show, 1)


def _line(label: str, values: Sequence[tuple[float, int]], show: Callable[[float], str], num_ranks: int) -> str:
    middle, (most, rank) = median(value for value, _ in values), max(values)
    where = f"rank {rank}" if num_ranks > 1 and most > _UNEVEN * middle else ""
    return f"| {label} | {show(middle)} | {show(most)} | {where} |"


def _notes(history: ResourceHistory) -> Iterator[str]:
    """What slowed the run from outside, in sentences."""
    limits = history.values(lambda used: used.cgroup.get("limit_cpus"))
    throttled = sum(one.used.cgroup.get("throttled_periods", 0) for one in history.records)
    periods = sum(one.used.cgroup.get("periods", 0) for one in history.records)
    if throttled and periods and limits:
        share = formatting.percent(throttled / periods)
        lowest, rank = min(limits)
        yield f"A CPU limit of {lowest:.3g} processors (rank {rank}'s) stopped workers in {share} of its periods."
    if any(one.used.host_wide.get("swap_in_bytes") for one in history.records):
        read = sum(one.used.host_wide.get("swap_in_bytes", 0) for one in history.records) / history.share
        yield f"The host swapped: {formatting.size(read)} were read back from swap."
    yield from _gpu_notes(history)


def _gpu_notes(history: ResourceHistory) -> Iterator[str]:
    records = [one.used for one in history.records if one.used.gpu]
    reasons = Counter(word for used in records for word in used.gpu_throttled_by)
    for word, times in reasons.most_common():
        yield f"GPU clocks were lowered by {word} in {formatting.percent(times / len(records))} of the samples."
    if energy_j := sum(used.gpu.get("energy_j", 0) for used in records) / history.share:
        yield f"GPUs used {energy_j / 3.6e6:.3g} kWh."
    for name, words in (("ecc_uncorrected", "could not correct"), ("ecc_corrected", "corrected")):
        if errors := sum(used.gpu.get(name, 0) for used in records) / history.share:
            yield f"GPU memory {words} {formatting.count(round(errors), 'error')}."


def _memory_notes(history: ResourceHistory) -> Iterator[str]:
    if not history.memory:
        return
    rank, most = max(history.memory.items(), key=lambda item: _state_bytes(item[1]))
    parts = [
        f"{words} {formatting.size(most.kinds[kind])}" for kind, words in KIND_WORDS.items() if most.kinds.get(kind)
    ]
    whose = f"Rank {rank} holds" if len(history.memory) > 1 else "Memory"
    if parts:
        yield f"{whose}: {', '.join(parts)}."


def _state_bytes(memory: MemoryUsed) -> int:
    return sum(memory.kinds.values())
