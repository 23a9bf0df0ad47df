"""Measures this machine for the planner: what its device, its links and its disk reach, in less than two minutes.

Invariants: each part has a share of the time and stops when it is used up, the largest shapes being left out; a
measurement that fails costs that part alone and is told, never the calibration.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import psutil
import torch

from closeranks.core.errors import SetupError
from closeranks.facts.calibration import (
    AttentionTime,
    Calibration,
    CollectiveTime,
    MemoryPassTime,
    OptimizerTime,
    ProductTime,
    WorkerSlowdown,
)
from closeranks.facts.layout import pluralize
from closeranks.lab.calibrate import kernels, workers
from closeranks.lab.calibrate.calibration_runs import calibration_runs, trained_steps
from closeranks.lab.calibrate.corrections import corrected
from closeranks.lab.calibrate.shapes import JobShapes, attention_of, gpu_jobs, products_of
from closeranks.lab.calibrate.timer import DeviceTimer
from closeranks.telemetry.device import device_name
from closeranks.testing.world import WorldError

_DISK_BYTES = 256 << 20
_CHUNK_BYTES = 8 << 20
_MOST_WORKERS = 8
_PASSES = 3


@dataclass(frozen=True, slots=True)
class CalibrationRequest:
    device: Literal["cpu", "cuda"]
    precisions: tuple[str, ...]
    jobs: tuple[JobShapes, ...] = ()
    job_files: tuple[Path, ...] = ()
    """Jobs of which a few steps are trained."""
    budget_s: float = 60.0
    """Of products and attention."""
    disk_folder: Path = field(default_factory=Path.cwd)
    """Where writing is measured."""


@dataclass
class _Clock:
    """The time that is left to a part."""

    say: Callable[[str], None]
    ends_at: float = 0.0

    def begin(self, budget_s: float) -> None:
        self.ends_at = time.monotonic() + budget_s

    def is_time_left(self) -> bool:
        return time.monotonic() < self.ends_at


def calibrate(request: CalibrationRequest, say: Callable[[str], None]) -> Calibration:
    """``say`` is told what is being measured, a line each."""
    device = _device(request.device)
    clock = _Clock(say)
    with _one_thread():
        found = _on_device(request, device, clock)
    num_cores = len(os.sched_getaffinity(0))
    if device.type == "cpu":
        found = replace(found, slowdowns=_slowdowns(num_cores, clock))
    found = replace(
        found,
        device=device_name(device),
        kind="cpu" if device.type == "cpu" else "gpu",
        num_cores=num_cores,
        versions={"torch": torch.__version__, "closeranks": version("closeranks")},
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        collectives=_collectives(worker_counts(num_cores), device, clock),
        disk_bytes_per_s=_disk_bytes_per_s(request.disk_folder, clock),
    )
    runs = [run for path in request.job_files for run in calibration_runs(path, device.type, num_cores)]
    return corrected(found, trained_steps(runs, found, clock.say))


def worker_counts(num_cores: int) -> tuple[int, ...]:
    """Of a CPU: two workers, one for each core, and two for each core, which then compete for it."""
    return tuple(sorted({min(count, _MOST_WORKERS) for count in (2, num_cores, 2 * num_cores) if count > 1}))


def _device(kind: str) -> torch.device:
    if kind == "cuda" and not torch.cuda.is_available():
        raise SetupError("torch finds no GPU here", "Measure the CPU with --device cpu.")
    return torch.device(kind, 0) if kind == "cuda" else torch.device(kind)


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _on_device(request: CalibrationRequest, device: torch.device, clock: _Clock) -> Calibration:
    timer, share_s = DeviceTimer(device, 0.03 / _PASSES, least_reps=1), request.budget_s / len(request.precisions)
    kind = "cpu" if device.type == "cpu" else "gpu"
    jobs = request.jobs or (gpu_jobs() if kind == "gpu" else ())
    memory_bytes = _free_bytes(device)
    products: list[ProductTime] = []
    attention: list[AttentionTime] = []
    memory: list[MemoryPassTime] = []
    optimizer: list[OptimizerTime] = []
    for number in range(_PASSES):
        clock.say(f"products, attention, memory and optimizer, {number + 1} of {_PASSES} times")
        for precision in request.precisions:
            clock.begin(0.4 * share_s / _PASSES)
            products += kernels.measure_products(timer, precision, products_of(kind, jobs), clock.is_time_left)
            clock.begin(0.2 * share_s / _PASSES)
            attention += kernels.measure_attention(timer, precision, attention_of(kind, jobs), clock.is_time_left)
        memory += kernels.measure_memory(timer, memory_bytes)
        optimizer += kernels.measure_optimizer(timer, memory_bytes)
    return Calibration(
        products=_fastest(products),
        attention=_fastest(attention),
        memory_passes=_fastest(memory),
        optimizer=_fastest(optimizer),
        op_overhead_s=kernels.measure_dispatch(timer),
        selective_op_s=kernels.measure_selective(timer),
    )


_T = TypeVar("_T", ProductTime, AttentionTime, MemoryPassTime, OptimizerTime)


def _fastest(measured: Iterable[_T]) -> tuple[_T, ...]:
    """What disturbs for a moment makes one of several passes longer, and never shorter."""
    found: dict[_T, _T] = {}
    for one in measured:
        times = {name: getattr(one, name) for name in ("seconds", "forward_s", "backward_s") if hasattr(one, name)}
        shape: _T = replace(one, **dict.fromkeys(times, cast("Any", 0.0)))
        known = found.get(shape, one)
        best: dict[str, Any] = {name: min(seconds, getattr(known, name)) for name, seconds in times.items()}
        found[shape] = replace(one, **best)
    return tuple(found.values())


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return int(psutil.virtual_memory().available)


def _slowdowns(num_cores: int, clock: _Clock) -> tuple[WorkerSlowdown, ...]:
    """The least disturbed of several passes, as for operations."""
    base: list[workers.LoopTimes] = []
    found: dict[int, list[workers.LoopTimes]] = {}
    with _failures_told(clock.say):
        for number in range(_PASSES):
            clock.say(f"workers beside each other, {number + 1} of {_PASSES} times")
            base.append(workers.measure_alone(1))
            found.setdefault(1, []).append(workers.measure_alone(num_cores))
            for count in worker_counts(num_cores):
                threads = max(1, num_cores // count)
                found.setdefault(count, []).append(workers.measure_together(count, threads))
    alone = workers.fastest(base)
    return tuple(workers.slowdown(count, alone, workers.fastest(times)) for count, times in found.items())


def _collectives(counts: Sequence[int], device: torch.device, clock: _Clock) -> tuple[CollectiveTime, ...]:
    on_gpus = device.type == "cuda"
    if on_gpus:
        num_gpus = torch.cuda.device_count()
        counts = tuple(sorted({count for count in (2, 4, num_gpus) if 1 < count <= num_gpus}))
    found: list[CollectiveTime] = []
    with _failures_told(clock.say):
        for count in counts:
            clock.say(f"collectives of {count} workers, by {'NCCL' if on_gpus else 'Gloo'}")
            found += workers.measure_collectives(count, on_gpus=on_gpus)
    return tuple(found)


@contextmanager
def _failures_told(say: Callable[[str], None]) -> Iterator[None]:
    try:
        yield
    except WorldError as error:
        lines = str(error).splitlines()
        say(f"not measured: {lines[0].strip('- ')}: {lines[-1]}")


def _disk_bytes_per_s(folder: Path, clock: _Clock) -> float | None:
    """Of one file, until it is durable."""
    clock.say(f"the disk of {folder}")
    chunk, path = os.urandom(_CHUNK_BYTES), folder / f".closeranks-calibrate-{os.getpid()}"
    try:
        with path.open("wb") as file:
            began_at = time.perf_counter()
            for _ in range(_DISK_BYTES // _CHUNK_BYTES):
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
            return _DISK_BYTES / (time.perf_counter() - began_at)
    except OSError as error:
        clock.say(f"not measured: {folder}: {error.strerror or error}")
        return None
    finally:
        path.unlink(missing_ok=True)


def summary(calibration: Calibration) -> Mapping[str, str]:
    """The figures that people compare with a datasheet, in words."""
    rows = {"device": f"{calibration.device}, torch {calibration.versions.get('torch', '?')}"}
    for precision in dict.fromkeys(one.precision for one in calibration.products):
        rates = [one.flops / one.seconds for one in calibration.products if one.precision == precision]
        rows[f"products in {precision}"] = f"{len(rates)} shapes, up to {max(rates) / 1e12:.3g} TFLOP/s"
    if calibration.memory_passes:
        largest = max(calibration.memory_passes, key=lambda one: one.num_bytes)
        rows["memory"] = f"{largest.num_bytes / largest.seconds / 1e9:.3g} GB/s"
    for one in calibration.slowdowns:
        rows[pluralize(one.num_workers, "worker")] = (
            f"products take {one.products:.2f}, memory {one.memory:.2f} times as long"
        )
    for count in dict.fromkeys(one.num_ranks for one in calibration.collectives):
        own = [one for one in calibration.collectives if (one.num_ranks, one.operation) == (count, "all-reduce")]
        if own:
            largest_own = max(own, key=lambda one: one.num_bytes)
            rate = largest_own.num_bytes / largest_own.seconds / 1e9
            rows[f"all-reduce of {count}"] = f"{rate:.3g} GB/s, at least {1e6 * min(o.seconds for o in own):.0f} us"
    if calibration.corrections:
        shown = ", ".join(f"{name} {factor:.2f}" for name, factor in calibration.corrections.items())
        rows["whole steps"] = f"measured over estimated: {shown}"
        overheads = (calibration.step_overhead_s or 0.0, calibration.micro_batch_overhead_s or 0.0)
        rows["overhead"] = f"{1e3 * overheads[0]:.3g} ms a step, {1e3 * overheads[1]:.3g} ms a micro-batch"
    if calibration.disk_bytes_per_s:
        rows["disk"] = f"{calibration.disk_bytes_per_s / 1e9:.3g} GB/s written"
    return rows
