"""Measures operations on the device of this process: products, attention, memory passes, the optimizer, dispatch.

Invariants: operands are random (zeros save power, and flatter a GPU) and change from call to call, so that a CPU does
not find all of them in its nearest cache, as it would not in a step; no tensor outlives its measurement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import cycle

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from closeranks.facts.calibration import AttentionTime, MemoryPassTime, OptimizerTime, ProductTime
from closeranks.facts.shapes.llama import LlamaShape
from closeranks.lab.calibrate.shapes import AttentionPlace, ProductShape
from closeranks.lab.calibrate.timer import DeviceTimer
from closeranks.models.llama.attention import attend
from closeranks.models.llama.model import Block
from closeranks.parallel.recompute import recompute
from closeranks.plan.step_time.measured_times import FORWARD_OPERATIONS

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_ROTATED_BYTES = 16 << 20
_MOST_COPIES = 8
_MEMORY_BYTES = tuple(1 << power for power in range(14, 29, 2))
_SMALL = LlamaShape(dim=16, num_layers=1, num_heads=2, num_kv_heads=1, ffn_dim=16, vocab_size=16)
_NUM_PARAMS = (10_000, 100_000, 1_000_000, 10_000_000)


def measure_products(
    timer: DeviceTimer, precision: str, shapes: Iterable[ProductShape], is_time_left: Callable[[], bool]
) -> Iterator[ProductTime]:
    """As ``F.linear`` computes them; stops where the time is up."""
    for shape in shapes:
        if not is_time_left():
            return
        yield ProductTime(precision, shape.m, shape.n, shape.k, _product_s(timer, DTYPES[precision], shape))


def _product_s(timer: DeviceTimer, dtype: torch.dtype, shape: ProductShape) -> float:
    size = shape.elements * dtype.itemsize
    copies = max(1, min(_MOST_COPIES, _ROTATED_BYTES // size))
    inputs = cycle(
        [
            (_random(timer, dtype, shape.m, shape.k), _random(timer, dtype, shape.n, shape.k))
            for _ in range(copies if timer.device.type == "cpu" else 1)
        ]
    )
    return timer.seconds(lambda: F.linear(*next(inputs)))


def measure_attention(
    timer: DeviceTimer, precision: str, places: Iterable[AttentionPlace], is_time_left: Callable[[], bool]
) -> Iterator[AttentionTime]:
    for place in places:
        if not is_time_left():
            return
        sizes = (place.batch, place.num_heads, place.seq_len, place.head_dim)
        yield AttentionTime(precision, *sizes, *_attention_s(timer, DTYPES[precision], place))


def _attention_s(timer: DeviceTimer, dtype: torch.dtype, place: AttentionPlace) -> tuple[float, float]:
    """Forward and backward, by the kernel that our models use."""
    heads = (place.num_heads, place.num_kv_heads, place.num_kv_heads)
    tensors = [
        _random(timer, dtype, place.batch, place.seq_len, count, place.head_dim).transpose(1, 2) for count in heads
    ]
    queries, keys, values = (tensor.detach().requires_grad_() for tensor in tensors)
    output = attend(queries, keys, values, "auto")
    gradient = torch.randn_like(output)

    def backward() -> None:
        torch.autograd.grad(output, (queries, keys, values), gradient, retain_graph=True)

    return timer.seconds(lambda: attend(queries, keys, values, "auto")), timer.seconds(backward)


def measure_memory(timer: DeviceTimer, memory_bytes: int) -> tuple[MemoryPassTime, ...]:
    """One elementwise operation that reads one tensor and writes another of the same size."""
    found = []
    for total in _MEMORY_BYTES if timer.device.type == "cpu" else (*_MEMORY_BYTES, 1 << 30, 1 << 32):
        if 4 * total > memory_bytes:
            break
        source = _random(timer, torch.float32, total // 8)
        target = torch.empty_like(source)
        found.append(MemoryPassTime(total, timer.seconds(lambda a=source, b=target: torch.mul(a, 1.5, out=b))))  # type: ignore[misc]
    return tuple(found)


def measure_dispatch(timer: DeviceTimer) -> float:
    """An operation on a single element: what remains is dispatch, and on a GPU the launch."""
    one = torch.ones(1, device=timer.device)
    return timer.seconds(lambda: [one.add(1.0) for _ in range(20)]) / 20


def measure_selective(timer: DeviceTimer) -> float:
    """What selective recompute adds to each operation of a block, in both forwards, which pass through Python: of a
    block so small that nothing else takes long."""
    block = Block(_SMALL, 0.0, "auto").to(timer.device)
    for weight in block.parameters():
        nn.init.normal_(weight, std=0.02)
    hidden = torch.randn(1, 4, _SMALL.dim, device=timer.device, requires_grad=True)
    angles = torch.randn(4, _SMALL.head_dim // 2, device=timer.device)
    forward_s = timer.seconds(lambda: block(hidden, angles, angles))
    plain_s = timer.seconds(lambda: block(hidden, angles, angles).sum().backward())
    recompute(nn.ModuleDict({"block": block}), ["block"], "selective")
    again_s = timer.seconds(lambda: block(hidden, angles, angles).sum().backward())
    return max(0.0, again_s - plain_s - forward_s) / 2 / FORWARD_OPERATIONS


def measure_optimizer(timer: DeviceTimer, memory_bytes: int) -> tuple[OptimizerTime, ...]:
    """Fused AdamW over tensors of the size of a small model's weights."""
    found = []
    sizes = _NUM_PARAMS if timer.device.type == "cpu" else (*_NUM_PARAMS, 100_000_000, 1_000_000_000)
    for num_params in sizes:
        if 4 * 16 * num_params > memory_bytes:
            break
        each = max(1000, num_params // 40)
        weights = [_random(timer, torch.float32, each).requires_grad_() for _ in range(num_params // each)]
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        optimizer = torch.optim.AdamW(weights, lr=1e-4, fused=True)
        found.append(OptimizerTime(num_params, timer.seconds(optimizer.step)))
    return tuple(found)


def _random(timer: DeviceTimer, dtype: torch.dtype, *sizes: int) -> Tensor:
    return torch.randn(sizes, device=timer.device).to(dtype)
