"""What was measured of a device, its links and its disk, and what follows for shapes that were not measured.

Times are those of one worker alone that computes with one thread of a CPU, or with the whole of a GPU; ``slowdown``
says how much longer the same takes where several workers share the host. Between measured shapes times are interpolated
in log space. Invariants: a shape that was measured gives the time that was measured; what was not measured gives None.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from closeranks.core.dataclass_fields import checked_fields
from closeranks.core.errors import UserError
from closeranks.core.system.regular_file import read_text

FORMAT = 1
_MOST_BYTES = 4 << 20
_NEAREST = 6
"""How many measured shapes count for one that was not measured."""


@dataclass(frozen=True, slots=True)
class ProductTime:
    """A product of [m, k] and [k, n]."""

    precision: str
    m: int
    n: int
    k: int
    seconds: float

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k


@dataclass(frozen=True, slots=True)
class AttentionTime:
    """Causal attention of ``num_heads`` heads for each sample of a micro-batch."""

    precision: str
    batch: int
    num_heads: int
    seq_len: int
    head_dim: int
    forward_s: float
    backward_s: float

    @property
    def flops(self) -> float:
        """Of the forward; every query with every key."""
        return 4.0 * self.batch * self.num_heads * self.seq_len**2 * self.head_dim


@dataclass(frozen=True, slots=True)
class MemoryPassTime:
    """An elementwise operation that reads and writes this many bytes in all."""

    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class OptimizerTime:
    """One update of this many parameters by fused AdamW, in float32."""

    num_params: int
    seconds: float


@dataclass(frozen=True, slots=True)
class CollectiveTime:
    """A collective, or a ``send``, between workers of one host; ``num_bytes`` of the whole tensor."""

    operation: str
    num_ranks: int
    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class WorkerSlowdown:
    """How many times as long work takes on a host with this many workers, which compete for its cores and memory."""

    num_workers: int
    products: float = 1.0
    memory: float = 1.0


class _Sample(NamedTuple):
    place: tuple[float, ...]
    """Logarithms of the sizes."""
    work: float
    seconds: float


@dataclass(frozen=True)
class Calibration:
    device: str = ""
    """As the driver, or the kernel, calls it."""
    kind: str = "cpu"
    num_cores: int = 0
    """Of a CPU."""
    versions: dict[str, str] = field(default_factory=dict)
    measured_at: str = ""
    products: tuple[ProductTime, ...] = ()
    attention: tuple[AttentionTime, ...] = ()
    memory_passes: tuple[MemoryPassTime, ...] = ()
    optimizer: tuple[OptimizerTime, ...] = ()
    collectives: tuple[CollectiveTime, ...] = ()
    slowdowns: tuple[WorkerSlowdown, ...] = ()
    disk_bytes_per_s: float | None = None
    op_overhead_s: float | None = None
    """What an operation costs before it computes: dispatch, and on a GPU the launch of a kernel."""
    selective_op_s: float = 0.0
    """What selective recompute adds to each operation of a forward that is not compiled."""
    step_overhead_s: float | None = None
    micro_batch_overhead_s: float | None = None
    wait_share: float = 0.0
    """Of what ranks compute between two meetings: how long they wait there for the last of them."""
    corrections: dict[str, float] = field(default_factory=dict)
    """By the name of a part of a step: how many times as long as estimated it took in the runs that were measured."""

    def correction(self, part: str) -> float:
        return self.corrections.get(part, 1.0)

    def product_s(self, m: int, n: int, k: int, precision: str) -> float | None:
        samples = self._product_samples.get(precision, ())
        return _interpolate(samples, _place(m, n, k), 2.0 * m * n * k)

    def attention_s(
        self, batch: int, num_heads: int, seq_len: int, head_dim: int, precision: str, *, backward: bool = False
    ) -> float | None:
        work = 4.0 * batch * num_heads * seq_len**2 * head_dim
        samples = self._attention_samples.get((precision, backward), ())
        return _interpolate(samples, _place(batch * num_heads, seq_len, head_dim), work)

    def memory_s(self, num_bytes: float) -> float | None:
        """An elementwise operation that reads and writes this many bytes, without its dispatch."""
        return _on_line(self._memory_line, num_bytes)

    def optimizer_s(self, num_params: float) -> float | None:
        return _on_line(self._optimizer_line, num_params)

    def collective_s(self, operation: str, num_ranks: int, num_bytes: float, num_workers: int = 0) -> float | None:
        """None for more ranks than were measured. Between measured numbers of ranks, the next larger one counts.
        ``num_workers``: on the host, where all of them communicate, in groups beside each other."""
        if num_ranks <= 1:
            return 0.0
        lines = self._collective_lines.get(operation, {})
        measured = [ranks for ranks in sorted(lines) if ranks >= num_ranks]
        seconds = _on_line(lines[measured[0]], num_bytes) if measured else None
        if seconds is None or num_workers <= measured[0]:
            return seconds
        return seconds * self.crowding(num_workers) / self.crowding(measured[0])

    def crowding(self, num_workers: int) -> float:
        """How many times as long everything takes because workers outnumber the cores."""
        return max(1.0, self.slowdown(num_workers).products)

    def slowdown(self, num_workers: int) -> WorkerSlowdown:
        """Beyond the measured numbers the cores are divided among more workers. Without measurements, no slowdown."""
        known = sorted(self.slowdowns, key=lambda one: one.num_workers)
        if not known or self.kind != "cpu":
            return WorkerSlowdown(num_workers)
        last = known[-1]
        if num_workers >= last.num_workers:
            times = num_workers / last.num_workers
            return WorkerSlowdown(num_workers, last.products * times, last.memory * times)
        at = [float(one.num_workers) for one in known]
        products, memory = [one.products for one in known], [one.memory for one in known]
        return WorkerSlowdown(num_workers, _between(at, products, num_workers), _between(at, memory, num_workers))

    @cached_property
    def _product_samples(self) -> Mapping[str, tuple[_Sample, ...]]:
        found: dict[str, list[_Sample]] = {}
        for one in self.products:
            found.setdefault(one.precision, []).append(_Sample(_place(one.m, one.n, one.k), one.flops, one.seconds))
        return {precision: tuple(samples) for precision, samples in found.items()}

    @cached_property
    def _attention_samples(self) -> Mapping[tuple[str, bool], tuple[_Sample, ...]]:
        found: dict[tuple[str, bool], list[_Sample]] = {}
        for one in self.attention:
            place = _place(one.batch * one.num_heads, one.seq_len, one.head_dim)
            for backward, seconds in ((False, one.forward_s), (True, one.backward_s)):
                found.setdefault((one.precision, backward), []).append(_Sample(place, one.flops, seconds))
        return {key: tuple(samples) for key, samples in found.items()}

    @cached_property
    def _memory_line(self) -> _Line:
        return _line((one.num_bytes, one.seconds) for one in self.memory_passes)

    @cached_property
    def _optimizer_line(self) -> _Line:
        return _line((one.num_params, one.seconds) for one in self.optimizer)

    @cached_property
    def _collective_lines(self) -> Mapping[str, Mapping[int, _Line]]:
        found: dict[str, dict[int, list[tuple[float, float]]]] = {}
        for one in self.collectives:
            lines = found.setdefault(one.operation, {})
            lines.setdefault(one.num_ranks, []).append((one.num_bytes, one.seconds))
        return {name: {ranks: _line(points) for ranks, points in lines.items()} for name, lines in found.items()}


# --- interpolation


def _place(*sizes: float) -> tuple[float, ...]:
    return tuple(math.log2(max(size, 1)) for size in sizes)


def _interpolate(samples: Sequence[_Sample], place: tuple[float, ...], work: float) -> float | None:
    """Near measured shapes, what they took beyond a fixed cost and the best rate of any is interpolated; the nearest
    count most."""
    if not samples or work <= 0:
        return None if not samples else 0.0
    peak = max(one.work / one.seconds for one in samples)
    smallest = min(samples, key=lambda one: one.work)
    fixed_s = max(smallest.seconds - smallest.work / peak, 1e-9)
    nearest = sorted((math.dist(one.place, place), one.work, one.seconds) for one in samples)[:_NEAREST]
    if nearest[0][0] < 1e-9:
        return nearest[0][2]
    weights = [distance**-3 for distance, _, _ in nearest]
    logs = [math.log(seconds / (fixed_s + done / peak)) for _, done, seconds in nearest]
    factor = math.exp(math.fsum(weight * log for weight, log in zip(weights, logs, strict=True)) / math.fsum(weights))
    return factor * (fixed_s + work / peak)


_Line = tuple[tuple[float, ...], tuple[float, ...]]
"""Sizes, rising, and the seconds of each."""


def _line(points: Iterable[tuple[float, float]]) -> _Line:
    ordered = sorted(points)
    return tuple(size for size, _ in ordered), tuple(seconds for _, seconds in ordered)


def _on_line(line: _Line, size: float) -> float | None:
    """Below the smallest size its time, above the largest its rate."""
    sizes, seconds = line
    if not sizes:
        return None
    if size <= sizes[0]:
        return seconds[0]
    if size >= sizes[-1]:
        return seconds[-1] * size / sizes[-1]
    logs = [math.log(one) for one in seconds]
    return math.exp(_between([math.log(one) for one in sizes], logs, math.log(size)))


def _between(places: Sequence[float], values: Sequence[float], at: float) -> float:
    """On the straight line between two neighbours; beyond the ends, the value of the end."""
    right = bisect_left(places, at)
    if right == 0 or right == len(places):
        return values[min(right, len(places) - 1)]
    share = (at - places[right - 1]) / (places[right] - places[right - 1])
    return values[right - 1] + share * (values[right] - values[right - 1])


# --- files

_LISTS: Mapping[str, type[Any]] = {
    "products": ProductTime,
    "attention": AttentionTime,
    "memory_passes": MemoryPassTime,
    "optimizer": OptimizerTime,
    "collectives": CollectiveTime,
    "slowdowns": WorkerSlowdown,
}
_FIGURES = (
    "disk_bytes_per_s",
    "op_overhead_s",
    "selective_op_s",
    "step_overhead_s",
    "micro_batch_overhead_s",
    "wait_share",
)
_FIX = "Measure this machine anew: closeranks plan calibrate."
_T = TypeVar("_T")


def calibration_text(calibration: Calibration) -> str:
    """JSON, a line for each measurement."""
    parts = [f'"format": {FORMAT}']
    for one in fields(calibration):
        value = getattr(calibration, one.name)
        if one.name in _LISTS:
            rows = ",\n  ".join(json.dumps(asdict(row)) for row in value)
            parts.append(f'"{one.name}": [\n  {rows}\n]' if rows else f'"{one.name}": []')
        else:
            parts.append(f'"{one.name}": {json.dumps(value)}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def parse_calibration(values: Mapping[str, Any]) -> Calibration:
    """``ValueError`` or ``TypeError`` for anything that no calibration wrote."""
    if values.get("format") != FORMAT:
        raise ValueError(f"its format is {values.get('format')!r}, and this version reads {FORMAT}")
    given = checked_fields(Calibration, values)
    for name, kind in _LISTS.items():
        rows = given.get(name, [])
        if not isinstance(rows, list):
            raise ValueError(f"{name} must be a list")
        given[name] = tuple(_row(kind, name, row) for row in rows)
    single = (
        "disk_bytes_per_s",
        "op_overhead_s",
        "selective_op_s",
        "step_overhead_s",
        "micro_batch_overhead_s",
        "wait_share",
    )
    figures = {name: value for name in single if (value := given.get(name)) is not None}
    for name, value in {**figures, **given.get("corrections", {})}.items():
        if not 0 <= value <= _most(name):
            raise ValueError(f"its {name} is {value:g}, which nothing measured can be")
    return Calibration(**given)


def _row(kind: type[_T], name: str, row: Any) -> _T:
    if not isinstance(row, dict):
        raise ValueError(f"{name} must be a list of tables")
    given = checked_fields(kind, row)
    for figure, value in given.items():
        if not isinstance(value, str) and not 0 < value <= _most(figure):
            raise ValueError(f"among its {name}, {figure} is {value:g}, which nothing measured can be")
    return kind(**given)


def _most(name: str) -> float:
    """No operation takes an hour, and no disk, tensor or factor is as large as the rest."""
    return 3600.0 if name == "seconds" or (name.endswith("_s") and name != "disk_bytes_per_s") else 1e15


def load_calibration(path: Path) -> Calibration:
    """``UserError`` for a file that cannot be used."""
    try:
        values = json.loads(read_text(path, _MOST_BYTES))
        if not isinstance(values, dict):
            raise ValueError("it is not a table")
        return parse_calibration(values)
    except OSError as error:
        raise UserError(f"the calibration {path} cannot be read: {error.strerror or error}", _FIX) from error
    except (ValueError, TypeError, RecursionError) as error:
        raise UserError(f"the calibration {path} cannot be used: {error}", _FIX) from error
