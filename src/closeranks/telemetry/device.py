"""Identifies a device, measures its matrix-multiply speed, and reports its memory use.

Invariant: a measurement leaves nothing behind: no tensor stays allocated, and peak counters are reset.
"""

from __future__ import annotations

import math
import os
import platform
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import psutil
import torch
from torch import Tensor, nn

from closeranks.telemetry.out_of_memory import MemoryUse, TensorSize, explain

_BUDGET_S = 0.1
_NUM_REPS = 5
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_ACCELERATOR_SIZES = (8192, 4096, 2048, 1024)
_CPU_SIZES = (1024, 768, 512, 384, 256)


def device_name(device: torch.device) -> str:
    """The usual name of the device: ``NVIDIA H200``, or the CPU's model name."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return device.type
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    return cpu_model(text) or f"{platform.processor() or platform.machine()} CPU"


def device_memory_bytes(device: torch.device, num_workers: int) -> int:
    """Memory of the device; without one, an equal share of the host's memory for each of its workers."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return int(psutil.virtual_memory().total) // max(1, num_workers)


def cpu_model(cpuinfo: str) -> str:
    """The model name in ``/proc/cpuinfo`` without trademark signs; empty if there is none (as on ARM)."""
    found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    return " ".join(re.sub(r"\((R|TM)\)", "", found[1]).split()) if found else ""


def measure_matmul_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Measured FLOP/s of a large matrix product: the best of a few, within about a tenth of a second.

    A burst on random data (zeros would flatter: they save power), under the current TF32 setting. A device that
    throttles under load sustains less. The size is the largest whose repetitions stay within the budget.
    """
    is_cuda = device.type == "cuda"
    sizes = _ACCELERATOR_SIZES if is_cuda else _CPU_SIZES
    with torch.no_grad():
        probed = _best_speed(min(sizes), device, dtype)
        size = pick_size(sizes, probed)
        speed = _best_speed(_fitting_size(size, device, dtype) if is_cuda else size, device, dtype)
    if is_cuda:
        # The run's own peak is counted from here on.
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return max(probed, speed)


def pick_size(sizes: tuple[int, ...], speed: float) -> int:
    """The largest of ``sizes`` whose repetitions fit the budget at this speed."""
    affordable = [size for size in sizes if _NUM_REPS * _flops(size) / speed <= _BUDGET_S]
    return max(affordable, default=min(sizes))


def _best_speed(size: int, device: torch.device, dtype: torch.dtype) -> float:
    """The best of a few products after one warm-up; fewer if the budget is spent, but at least one."""
    timed = _timed_on_accelerator if device.type == "cuda" else _timed_on_host
    operands = _operands(size, device, dtype)
    spent_s = timed(*operands)
    best_s = math.inf
    for _ in range(_NUM_REPS):
        seconds = timed(*operands)
        best_s = min(best_s, seconds)
        spent_s += seconds
        if spent_s > _BUDGET_S:
            break
    return _flops(size) / best_s


def _flops(size: int) -> float:
    return 2.0 * size**3


def _fitting_size(size: int, device: torch.device, dtype: torch.dtype) -> int:
    """Halved until three matrices take no more than a quarter of the free memory: the device may be shared."""
    free, _ = torch.cuda.mem_get_info(device)
    while size > 1024 and 3 * size * size * dtype.itemsize > free // 4:
        size //= 2
    return size


def _operands(size: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    # A generator of our own: the run's random streams must not depend on whether a measurement was made.
    generator = torch.Generator(device=device).manual_seed(0)
    left, right = (torch.randn(size, size, device=device, generator=generator).to(dtype) for _ in range(2))
    return left, right, torch.empty_like(left)


def _timed_on_host(left: Tensor, right: Tensor, out: Tensor) -> float:
    began_at = time.perf_counter()
    torch.mm(left, right, out=out)
    return time.perf_counter() - began_at


def _timed_on_accelerator(left: Tensor, right: Tensor, out: Tensor) -> float:
    began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    began.record()
    torch.mm(left, right, out=out)
    ended.record()
    ended.synchronize()
    return float(began.elapsed_time(ended)) / 1000


def peak_memory_bytes(device: torch.device) -> int:
    """The accelerator's peak since the run began, or this process's resident set. About 10 us."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resident_bytes()


def resident_bytes() -> int:
    # Opened each time: a file kept open would still report the process that forked this one.
    try:
        file = os.open("/proc/self/statm", os.O_RDONLY)
    except OSError:
        return int(psutil.Process().memory_info().rss)
    try:
        return int(os.read(file, 128).split()[1]) * _PAGE_BYTES
    finally:
        os.close(file)


def device_uuid(device: torch.device) -> str:
    """The name of a GPU that NVML knows it by; empty for a CPU."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}" if device.type == "cuda" else ""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on an accelerator or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    markers = (
        "DefaultCPUAllocator: can't allocate memory",
        "DefaultCPUAllocator: not enough memory",
        "CUDA error: out of memory",
        "CUDA out of memory",
        "CUBLAS_STATUS_ALLOC_FAILED",
    )
    return isinstance(error, RuntimeError) and any(marker in str(error) for marker in markers)


def explain_out_of_memory(
    module: nn.Module, state_tensors: Iterable[Tensor], device: torch.device, error: BaseException, *, is_mixed: bool
) -> str:
    """What took the memory and what to change; ``is_mixed``: the run already computes in half precision.

    ``state_tensors``: the optimizer state; tensors on other devices do not count. Call before anything is freed:
    parameters, gradients and optimizer state are read as they are.
    """
    use = memory_use(module, state_tensors, device, error)
    return explain(replace(use, is_float32=use.is_float32 and not is_mixed))


def memory_use(
    module: nn.Module, state_tensors: Iterable[Tensor], device: torch.device, error: BaseException
) -> MemoryUse:
    here = {name: parameter for name, parameter in module.named_parameters() if parameter.device.type == device.type}
    gradients = [parameter.grad for parameter in here.values() if parameter.grad is not None]
    return MemoryUse(
        device=device_name(device),
        in_use_bytes=peak_memory_bytes(device),
        total_bytes=total_bytes(device),
        requested_bytes=requested_bytes(str(error)),
        parameters_bytes=sum(_num_bytes(parameter) for parameter in here.values()),
        gradients_bytes=sum(_num_bytes(gradient) for gradient in gradients),
        optimizer_bytes=sum(_num_bytes(tensor) for tensor in state_tensors if tensor.device.type == device.type),
        largest=tuple(TensorSize(name, _num_bytes(parameter)) for name, parameter in here.items()),
        is_float32=any(parameter.dtype == torch.float32 for parameter in here.values()),
    )


def _num_bytes(tensor: Tensor) -> int:
    """Bytes on this rank: for a sharded tensor, its local part only."""
    to_local: Callable[[], Tensor] | None = getattr(tensor, "to_local", None)
    local = to_local() if to_local is not None else tensor
    return local.numel() * local.element_size()


def total_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return int(psutil.virtual_memory().total)


_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def requested_bytes(message: str) -> int:
    """How much the failed allocation asked for, according to torch's message; 0 if it does not say."""
    on_device = re.search(r"Tried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)", message)
    if on_device is not None:
        return int(float(on_device[1]) * _UNITS[on_device[2]])
    on_host = re.search(r"you tried to allocate (\d+) bytes", message)
    return int(on_host[1]) if on_host is not None else 0
