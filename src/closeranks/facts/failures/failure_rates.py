"""How often does a device interrupt a run, by kind of failure? Tables from published runs, or the user's own.

A table says how many failures of each kind were seen in how many device-hours, and what such a failure does: how it
shows, how many hosts it takes with it, and how long until they are back. Invariant: a rate is always a count divided by
the device-hours in which it was counted, and every built-in table names its source.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, Final

from closeranks.core.errors import UserError
from closeranks.core.system.regular_file import read_text

CRASH: Final = "crash"
HANG: Final = "hang"
SLOW: Final = "slow"
SILENT: Final = "silent"
SHOWS: Final = (CRASH, HANG, SLOW, SILENT)
DEFAULT_TABLE: Final = "llama3"
_FOLDER = Path(__file__).parent
_MOST_BYTES = 1 << 20
_TABLE_KEYS = {"extends", "device_hours", "source", "date", "failure"}
_KEYS = {"kind", "count", "device_hours", "shows", "hosts", "repair_h", "notice_s", "slowdown"}
_FIX = "Write a TOML file with device_hours and [[failure]] entries of kind and count (docs/plan-goodput.md)."


@dataclass(frozen=True, slots=True)
class FailureKind:
    kind: str
    count: float
    """Failures seen,"""
    device_hours: float
    """and in how many device-hours of a running job."""
    shows: str = CRASH
    """``crash``: a worker dies or raises. ``hang``: it stands still. ``slow``: it and thus all others become slower.
    ``silent``: it computes wrong values, which a later check finds."""
    hosts: int = 0
    """Hosts that are lost with it; 0: the same hosts train on."""
    repair_h: float = 0.0
    """Mean hours until a lost host is back."""
    notice_s: float = 0.0
    """Warning time before the hosts are taken."""
    slowdown: float = 1.0
    """How many times as long a step takes with such a device, until it is evicted."""

    @property
    def per_device_hour(self) -> float:
        return self.count / self.device_hours


@dataclass(frozen=True, slots=True)
class FailureTable:
    kinds: tuple[FailureKind, ...]
    source: str = ""
    date: str = ""

    @property
    def per_device_hour(self) -> float:
        return sum(kind.per_device_hour for kind in self.kinds)

    def mtbf_s(self, num_devices: int) -> float:
        """Mean time between failures of any kind for a run on this many devices; infinite without failures."""
        rate = self.per_device_hour * num_devices
        return 3600 / rate if rate else math.inf


def table_names() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.toml")))


def load_failures(name: str = DEFAULT_TABLE) -> FailureTable:
    """A built-in table by its name, or the file at this path; ``UserError`` for one that cannot be used."""
    built_in = name in table_names()
    if not built_in and not name.endswith(".toml"):
        known = ", ".join(table_names())
        raise UserError(
            f"there is no table of failures '{name}'", f"Name one of {known}, or a file that ends in .toml."
        )
    path = _FOLDER / f"{name}.toml" if built_in else Path(name)
    try:
        return parse_failures(tomllib.loads(read_text(path, _MOST_BYTES)))
    except OSError as error:
        raise UserError(f"the failures {path} cannot be read: {error.strerror or error}", _FIX) from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"the failures {path} cannot be used: {error}", _FIX) from error


def parse_failures(values: Mapping[str, Any]) -> FailureTable:
    """``ValueError`` for anything that is not a table of failures."""
    if unknown := sorted(set(values) - _TABLE_KEYS):
        raise ValueError(f"'{unknown[0]}' is none of {', '.join(sorted(_TABLE_KEYS))}")
    entries, source, day = values.get("failure", []), values.get("source", ""), values.get("date", "")
    if not isinstance(entries, list):
        raise ValueError("failure must be a list: write [[failure]]")
    if not isinstance(source, str) or not isinstance(day, str | date):
        raise ValueError("source and date must be text")
    hours = values.get("device_hours")
    own = [_failure(entry, hours) for entry in entries]
    names = [kind.kind for kind in own]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"the kind '{repeated[0]}' occurs twice")
    kinds = _extended(values["extends"], own) if "extends" in values else own
    return FailureTable(tuple(kind for kind in kinds if kind.count), source, str(day))


def _extended(name: Any, own: Sequence[FailureKind]) -> list[FailureKind]:
    """The built-in table with entries replaced by those of the same kind; one with count = 0 removes it."""
    if name not in table_names():
        raise ValueError(f"extends must be one of {', '.join(table_names())}")
    names = {kind.kind for kind in own}
    return [*(kind for kind in load_failures(name).kinds if kind.kind not in names), *own]


def _failure(entry: Any, table_hours: Any) -> FailureKind:
    if not isinstance(entry, dict) or not re.fullmatch(r"\S(.{0,38}\S)?", str(entry.get("kind", ""))):
        raise ValueError('every [[failure]] needs a kind, such as kind = "gpu"')
    kind = str(entry["kind"])
    if unknown := sorted(set(entry) - _KEYS):
        raise ValueError(f"the failure '{kind}' has an unknown key '{unknown[0]}'")
    hours = entry.get("device_hours", table_hours)
    if not _is_number(hours) or not hours > 0:
        raise ValueError(f"the failure '{kind}' needs device_hours above 0, here or at the top of the file")
    if not _is_number(entry.get("count")) or entry["count"] < 0:
        raise ValueError(f"the failure '{kind}' needs count, the number of failures in these device-hours")
    shows, hosts = entry.get("shows", CRASH), entry.get("hosts", 0)
    if shows not in SHOWS:
        raise ValueError(f"shows of the failure '{kind}' must be one of {', '.join(SHOWS)}")
    if isinstance(hosts, bool) or not isinstance(hosts, int) or not 0 <= hosts <= 1000:
        raise ValueError(f"hosts of the failure '{kind}' must be a whole number from 0 to 1000")
    numbers = {"repair_h": 0.0, "notice_s": 0.0, "slowdown": 1.0}
    for key, least in numbers.items():
        value = entry.get(key, least)
        if not _is_number(value) or not least <= value <= 1e6:
            raise ValueError(f"{key} of the failure '{kind}' must be a number from {least:g} to 1000000")
        numbers[key] = float(value)
    return FailureKind(kind, float(entry["count"]), float(hours), shows, hosts, **numbers)


def _is_number(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, int | float) and math.isfinite(value)
