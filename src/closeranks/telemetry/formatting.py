"""Formats numbers for people.

Invariant: the width hardly changes from step to step, and there are never more digits than are meaningful.
"""

from __future__ import annotations

import math

_ITEM_UNITS = {"token": "tok/s", "sample": "samples/s"}
_METRIC_LABELS = {"accuracy": "acc"}


def number(value: float) -> str:
    """A loss, a norm, a learning rate: five digits where they fit, else an exponent."""
    if not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    size = abs(value)
    if size == 0:
        return "0.0000"
    if size < 0.01 or size >= 99_999.5:
        return f"{value:.2e}"
    decimals = 4 if size < 9.99995 else 3 if size < 99.9995 else 2 if size < 999.995 else 1
    return f"{value:.{decimals}f}"


def brief(value: float) -> str:
    """Three digits, for prose: 5.50, 0.0123, 1.20e-05."""
    return f"{value:#.3g}".rstrip(".") if math.isfinite(value) else number(value)


def compact(value: float) -> str:
    """Three digits and a unit: 41.2k, 1.24B; a small whole number stays as it is."""
    if not math.isfinite(value):
        return number(value)
    if value == int(value) and abs(value) < 1000:
        return str(int(value))
    for unit in ("", "k", "M", "B"):
        if abs(value) < 999.5:
            return f"{value:.{_decimals(value)}f}{unit}"
        value /= 1000
    return f"{value:.{_decimals(value)}f}T"


def _decimals(value: float) -> int:
    return 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0


def tick(value: float) -> str:
    """A number on an axis, as short as it can be: 40k, 0.003, 2.5."""
    for unit, scale in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= scale:
            return f"{value / scale:.4g}{unit}"
    return f"{value:.4g}"


def count(num: int, noun: str) -> str:
    return f"{num} {noun}" if num == 1 else f"{num} {noun}s"


def rate(items_per_s: float, item: str) -> str:
    return f"{compact(items_per_s)} {_ITEM_UNITS.get(item, f'{item}s/s')}"


def percent(fraction: float) -> str:
    """50.3%; below a tenth of a percent, enough digits to show the order of magnitude."""
    percent = 100 * fraction
    return f"{percent:.1f}%" if percent >= 0.05 or percent == 0 else f"{percent:.1g}%"


def size(num_bytes: float) -> str:
    """1.2 GiB, 512 MiB, 0 B."""
    for unit in ("B", "KiB", "MiB"):
        if abs(num_bytes) < 1023.5:
            return f"{num_bytes:.{0 if unit == 'B' or num_bytes >= 99.95 else 1}f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} GiB"


def clock(seconds: float) -> str:
    """Remaining time, for a narrow column: 0:42, 12:03, 1:02:03, 2d 03:04."""
    if not math.isfinite(seconds):
        return number(seconds)
    whole = math.ceil(max(0.0, seconds))
    minutes, second = divmod(whole, 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour:02d}:{minute:02d}"
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def duration(seconds: float) -> str:
    """A duration, for prose: 80 ms, 3.2 s, 31 s, 2 min 5 s, 1 h 3 min."""
    if not math.isfinite(seconds):
        return number(seconds)
    if seconds < 0.0995:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min"


def short_duration(seconds: float) -> str:
    """A short duration, two digits: 3.1 us, 0.21 ms, 12 ms."""
    if seconds < 0.995e-4:
        return f"{1e6 * seconds:.2g} us"
    return f"{1000 * seconds:.2g} ms" if seconds < 0.0995 else duration(seconds)


def byte_rate(bytes_per_s: float) -> str:
    """In powers of ten, as link speeds are quoted: 12 MB/s, 310 MB/s, 1.2 GB/s."""
    if bytes_per_s >= 0.9995e9:
        return f"{bytes_per_s / 1e9:.3g} GB/s"
    return f"{bytes_per_s / 1e6:.3g} MB/s"


def metric_label(name: str) -> str:
    return _METRIC_LABELS.get(name, name)


def metric(value: float) -> str:
    """A metric beside the loss, three digits: 0.961."""
    return f"{value:.3f}" if 0.0005 <= abs(value) < 10 or value == 0 else brief(value)
