"""How many bytes does a person mean by ``256MB``?"""

from __future__ import annotations

import re

from closeranks.core.errors import UserError

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{letter}{end}": 1000**power for power, letter in enumerate("KMGT", 1) for end in ("", "B")}
_UNITS |= {f"{letter}IB": 1024**power for power, letter in enumerate("KMGT", 1)}


def parse_size(text: str, option: str) -> int:
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = _UNITS.get(found[2].upper()) if found else None
    if found is None or unit is None:
        raise UserError(f"{option} {text} is no size", "Write it as 256MB, 64MiB or 1.5GB.")
    num_bytes = int(float(found[1]) * unit)
    if num_bytes < 1:
        raise UserError(f"{option} {text} is nothing at all", "Write it as 256MB, 64MiB or 1.5GB.")
    return num_bytes
