"""How long does a matrix product of these shapes take on a device?

The result is cut into tiles, which the device's units work off in waves: a shape that does not fill its tiles or its
last wave pays for the whole. Short inner dims do not fill the pipelines, and rows that do not start on 128-byte
boundaries are read in more transactions. Invariant: no product is faster than the device's reachable FLOP/s or than
its operands can be read and its result written.
"""

from __future__ import annotations

from dataclasses import dataclass

from closeranks.facts.device_table import Device

_ALIGNMENT_BYTES = 128
_MIN_ALIGNMENT_BYTES = 16
_TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))
_ELEMENT_BYTES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1}


@dataclass(frozen=True, slots=True)
class ProductModel:
    """Constants of the model, each measurable with products alone."""

    half_k: float = 128.0
    """The inner dim at which a product reaches half of its speed: starting and ending a tile cost as much."""
    small_tile: float = 0.9
    """Speed of a tile of 128 x 128 relative to one of 256 x 128: each halving reads operands more often."""
    wave: float = 0.7
    """Share of the idle units of the last wave that is lost; the rest is filled by splitting the inner dim."""
    misaligned: float = 0.8
    """Speed with rows that are not a multiple of 128 bytes."""
    unaligned: float = 0.5
    """Speed with rows that are not a multiple of 16 bytes."""
    launch_s: float = 4e-6
    """Least time of a kernel."""
    sustained: float = 1.0
    """Speed of products in a training run relative to short measurements, where the device does not state its own."""


def product_seconds(
    m: int, n: int, k: int, device: Device, precision: str, model: ProductModel, count: int = 1
) -> float:
    """Of ``[m, k] @ [k, n]``, for a batch of ``count`` of them in one kernel."""
    if device.kind == "cpu":
        return 2.0 * count * m * n * k / device.reachable(precision)
    width = _ELEMENT_BYTES.get(precision, 2)
    seconds = (
        2.0 * _tiled_cells(m, n, count, device.num_units, model) * (k + model.half_k) / device.reachable(precision)
    )
    seconds /= _alignment(n, k, width, model)
    moved = float(count) * (m * k + k * n + m * n) * max(width, 2) / device.memory_bytes_per_s
    return max(seconds, moved) + model.launch_s


def _tiled_cells(m: int, n: int, count: int, units: int, model: ProductModel) -> float:
    """Cells of the result with those that are computed for nothing, and the slowness of small tiles, for the best
    tile."""
    best = float("inf")
    for rows, columns in _TILES:
        tiles = count * -(-m // rows) * -(-n // columns)
        idle = -(-tiles // units) * units - tiles
        size = rows * columns
        speed = 1.0 if size == 32768 else model.small_tile if size == 16384 else model.small_tile**2.5
        if size == 4096:
            speed *= model.small_tile**2
        best = min(best, (tiles + model.wave * idle) * size / speed)
    return best


def _alignment(n: int, k: int, width: int, model: ProductModel) -> float:
    least = min(_largest_power(n * width), _largest_power(k * width))
    if least >= _ALIGNMENT_BYTES:
        return 1.0
    return model.misaligned if least >= _MIN_ALIGNMENT_BYTES else model.unaligned


def _largest_power(number: int) -> int:
    """The largest power of two that divides it."""
    return number & -number
