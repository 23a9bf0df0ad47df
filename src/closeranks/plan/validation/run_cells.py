"""What does one cell of a table of runs say? Numbers and words as people write them, in the unit of their column.

Invariant: a unit or a word that is not known makes the cell unreadable, with the reason; it is never guessed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

BLANK = frozenset({"", "-", "–", "?", "n/a", "na", "null", "unknown", "not published"})
_SECONDS = {"s": 1.0, "sec": 1.0, "seconds": 1.0, "ms": 1e-3, "min": 60.0}
_TOKENS = {f"{unit}{per}": 1.0 for unit in ("tok/s", "tokens/s", "t/s") for per in ("", "/gpu")}
_FLOPS = {
    f"{prefix}{unit}{per}": factor
    for prefix, factor in (("g", 1e-3), ("t", 1.0), ("p", 1e3))
    for unit in ("flops", "flop/s")
    for per in ("", "/gpu")
}
_UNITS: Mapping[str, Mapping[str, float]] = {
    "step_time_s": _SECONDS,
    "step_time_derived_s": _SECONDS,
    "tokens_per_s_per_gpu": _TOKENS,
    "tflops_per_gpu": _FLOPS,
    "mfu_pct": {"%": 1.0},
    "memory_gib_per_gpu": {"gib": 1.0, "gb": 1e9 / 2**30, "mib": 1 / 1024, "mb": 1e6 / 2**30},
    "params_b": {"b": 1.0, "m": 1e-3, "t": 1e3},
}
_AMOUNT = re.compile(r"([+-]?(?:\d+|\d{1,3}(?:,\d{3})+)?(?:\.\d*)?(?:[eE][+-]?\d+)?)\s*([a-zA-Z/%]*)")
_LEAST, _MOST = 1e-9, 1e12
_THOUSANDS = frozenset({"step_time_s", "step_time_derived_s", "params_b", "mfu_pct"})
"""Where 3,567 could as well be 3.567."""

_PRECISIONS = (
    ("not modelled", r"fp4|int4|int8|tf32|fp6|float4"),
    ("fp8", r"fp8|float8|e4m3|e5m2"),
    ("bf16", r"bf16|bfloat16"),
    ("fp16", r"fp16|float16|half|\b16\b"),
    ("fp32", r"fp32|float32|single|\b32\b"),
)
_RECOMPUTE = {
    "none": {"none", "no", "not", "without", "false", "off", "0", "disabled"},
    "full": {"full", "true", "yes", "on", "1", "all", "every"},
    "selective": {"selective", "sel", "attention", "core_attn", "core"},
}
"""By the first word."""


def read_number(key: str, text: str) -> float | str:
    """In the unit of the column, or why not."""
    found = _AMOUNT.fullmatch(text)
    if not found or not any(char.isdigit() for char in found.group(1)):
        return f"{key} is not a number"
    amount, unit = found.groups()
    if "," in amount and key in _THOUSANDS and "." not in amount:
        return f"{key} has a comma that may be a decimal one"
    factor = 1.0 if not unit else _UNITS.get(key, {}).get(unit.lower())
    if factor is None:
        return f"{key} is in a unit that is not known" if key in _UNITS else f"{key} is not a number"
    value = float(amount.replace(",", "")) * factor
    return value if value == 0 or _LEAST < abs(value) < _MOST else f"{key} is too large or too small"


def read_word(key: str, text: str) -> str | None:
    """Precision and recompute in the words of a plan, other cells as they are; None for a word that is not known."""
    if key == "precision":
        joined = re.sub(r"[-_]", " ", text.lower())
        return next((name for name, pattern in _PRECISIONS if re.search(pattern, joined)), None)
    if key == "recompute":
        word = re.split(r"[^\w]+", text.lower())[0]
        return next((name for name, words in _RECOMPUTE.items() if word in words), None)
    return text
