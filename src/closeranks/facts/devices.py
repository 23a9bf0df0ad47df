"""What the name of a device tells: its peak FLOP/s, from the vendors' datasheets.

Dense peaks (no structured sparsity) in TFLOP/s, matrix units where the precision has them, 32-bit accumulation.
Invariant: a device or precision that is not in the table gives None, never a guess.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_TERA = 1e12


@dataclass(frozen=True, slots=True)
class DevicePeaks:
    """One datasheet column; None where the datasheet has no figure or the hardware does not support the precision."""

    float64: float | None
    float32: float | None
    tf32: float | None
    bf16: float | None
    fp16: float | None


# The first pattern that matches the driver's name for the device wins, so the variants of a chip come before the chip.
_DATASHEETS: tuple[tuple[str, DevicePeaks], ...] = (
    (r"GB200", DevicePeaks(40, 80, 1250, 2500, 2500)),
    (r"B200", DevicePeaks(37, 75, 1125, 2250, 2250)),
    (r"H200 NVL", DevicePeaks(60, 60, 417.5, 835.5, 835.5)),
    (r"G?H200", DevicePeaks(66.9, 66.9, 494.7, 989.4, 989.4)),
    (r"H100 PCIe", DevicePeaks(51, 51, 378, 756, 756)),
    (r"H100 NVL", DevicePeaks(60, 60, 417.5, 835.5, 835.5)),
    (r"H100", DevicePeaks(66.9, 66.9, 494.7, 989.4, 989.4)),
    (r"H800", DevicePeaks(1, 66.9, 494.7, 989.4, 989.4)),
    (r"H20", DevicePeaks(1, 44, 74, 148, 148)),
    (r"A[18]00", DevicePeaks(19.5, 19.5, 156, 312, 312)),
    (r"A10", DevicePeaks(None, 31.2, 62.5, 125, 125)),
    (r"L40S", DevicePeaks(None, 91.6, 183, 362.05, 362.05)),
    (r"L4", DevicePeaks(None, 30.3, 60, 121, 121)),
    (r"T4", DevicePeaks(None, 8.1, None, None, 65)),
    (r"V100.*PCIE", DevicePeaks(7, 14, None, None, 112)),
    (r"V100", DevicePeaks(7.8, 15.7, None, None, 125)),
    (r"RTX A6000", DevicePeaks(None, 38.7, 77.4, 154.8, 154.8)),
    (r"RTX 5090", DevicePeaks(None, 104.8, 104.8, 209.5, 209.5)),
    (r"RTX 4090", DevicePeaks(None, 82.6, 82.6, 165.2, 165.2)),
    (r"RTX 3090", DevicePeaks(None, 35.6, 35.6, 71, 71)),
    (r"MI3(00|25)X", DevicePeaks(163.4, 163.4, 653.7, 1307.4, 1307.4)),
)


def datasheet_flops(device_name: str, precision: str) -> float | None:
    """Dense peak in FLOP/s of the device the driver calls ``device_name``; ``precision`` is a field of
    ``DevicePeaks``."""
    for pattern, peaks in _DATASHEETS:
        # Whole words only: an A10G is not an A10, and "L4" must not match "L40".
        if re.search(rf"(?<![A-Za-z0-9])(?:{pattern})(?![A-Za-z0-9])", device_name, re.IGNORECASE):
            tera = getattr(peaks, precision, None)
            return None if tera is None else tera * _TERA
    return None


def is_cpu(device_name: str) -> bool:
    """Whether a device's name is that of a CPU; accelerators are named by vendor and product (NVIDIA H200)."""
    words = device_name.lower()
    return any(word in words for word in ("cpu", "processor", "xeon", "epyc", "ryzen", "core"))
