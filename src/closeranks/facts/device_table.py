"""Which devices and links can a plan name, and what can each do? Built in (``devices.toml``), or from the user's file.

Invariant: every entry names its source; peaks come from the datasheets of ``facts.devices`` unless an entry states its
own; an unknown name is an error that lists the nearest ones, never a guess.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from closeranks.core.errors import ConfigError, Problem, UserError
from closeranks.core.registry import did_you_mean
from closeranks.core.system.regular_file import read_text
from closeranks.facts.devices import datasheet_flops

PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "fp8")
_DATASHEET_NAMES = {"fp32": "float32", "tf32": "tf32", "bf16": "bf16", "fp16": "fp16"}
_DEFAULT_ACHIEVABLE = 0.7
_MOST_BYTES = 1 << 20
_FIX = "Write a TOML file with [[device]] and [[link]] entries as in docs/plan-models.md."


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator, or one CPU core."""

    name: str
    kind: str
    """``gpu`` or ``cpu``."""
    peak_flops: Mapping[str, float]
    """Dense FLOP/s by precision."""
    achievable: Mapping[str, float]
    """Share of the peak that a large matrix product reaches alone, by precision."""
    memory_bytes: int
    memory_bytes_per_s: float
    num_units: int
    """Streaming multiprocessors or compute units, over which the tiles of a product are spread."""
    attention_forward: float = 0.4
    """Share of the peak that the executed operations of a fused attention reach."""
    attention_backward: float = 0.3
    driver_name: str = ""
    """The name the driver gives it: the key of the price and datasheet tables."""
    devices_per_host: int = 8
    nvlink_domain: int = 0
    """Devices that share the fast link, if these are more than one host's; 0: those of one host."""
    intra_host: str = ""
    inter_host: str = ""
    source: str = ""
    sustained: float = 0.0
    """Speed of products in a training run, where clocks fall under power, relative to alone; 0: not known."""

    def peak(self, precision: str) -> float:
        """Dense FLOP/s; of fp32 where the hardware has no such precision."""
        return self.peak_flops.get(precision) or self.peak_flops["fp32"]

    def reachable(self, precision: str) -> float:
        """FLOP/s of a large matrix product."""
        share = self.achievable.get(precision, _DEFAULT_ACHIEVABLE)
        return self.peak(precision) * (share if precision in self.peak_flops else self.achievable.get("fp32", share))


@dataclass(frozen=True, slots=True)
class FabricLink:
    """A kind of link: what one message waits, and how fast bytes follow it."""

    name: str
    latency_s: float
    bytes_per_s: float
    """One direction, of one device inside a host, of one network card between hosts."""
    efficiency: float = 1.0
    """Share of it that collectives of large messages reach."""
    source: str = ""
    start_s: float = 0.0
    """What a collective takes before its first hop: its launch, and until all ranks are there."""

    @property
    def effective_bytes_per_s(self) -> float:
        return self.bytes_per_s * self.efficiency


@dataclass(frozen=True, slots=True)
class DeviceTable:
    devices: Mapping[str, Device] = field(default_factory=dict)
    links: Mapping[str, FabricLink] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Normalized names to names of devices."""

    def find(self, name: str) -> Device | None:
        found = self.aliases.get(_normalized(name))
        return None if found is None else self.devices[found]

    def device(self, name: str) -> Device:
        if (found := self.find(name)) is None:
            known = [*self.devices, *self.aliases]
            raise ConfigError([Problem("device", f"there is no device '{name}'", _nearest(name, known, self.devices))])
        return found

    def link(self, name: str) -> FabricLink:
        by_name = {_normalized(known): link for known, link in self.links.items()}
        if (found := by_name.get(_normalized(name))) is None:
            raise ConfigError([Problem("link", f"there is no link '{name}'", _nearest(name, self.links, self.links))])
        return found

    def with_entries(self, other: DeviceTable) -> DeviceTable:
        """This table, with entries of the other added, or in place of those of the same name."""
        return DeviceTable(
            {**self.devices, **other.devices}, {**self.links, **other.links}, {**self.aliases, **other.aliases}
        )


def _nearest(name: str, known: Any, all_names: Mapping[str, object]) -> str:
    hint = did_you_mean(name.lower(), [str(entry).lower() for entry in known])
    return hint if hint.startswith("Did") else f"Known: {', '.join(sorted(all_names))}."


def _normalized(name: str) -> str:
    """Letters and digits only, without the vendor: ``NVIDIA H100-80GB SXM`` and ``h100 80gb sxm`` are one name."""
    return re.sub(r"[^a-z0-9.]", "", re.sub(r"\b(nvidia|tesla|amd|instinct)\b", "", name.lower()))


@cache
def built_in_devices() -> DeviceTable:
    return load_device_table(Path(__file__).with_name("devices.toml"))


def load_device_table(path: Path) -> DeviceTable:
    """The table in this file; ``UserError`` for one that cannot be used."""
    try:
        return parse_device_table(tomllib.loads(read_text(path, _MOST_BYTES)))
    except OSError as error:
        raise UserError(f"the devices {path} cannot be read: {error.strerror or error}", _FIX) from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"the devices {path} cannot be used: {error}", _FIX) from error


def parse_device_table(values: Mapping[str, Any]) -> DeviceTable:
    """``ValueError`` for anything that is not a table of devices and links."""
    if unknown := sorted(set(values) - {"device", "link"}):
        raise ValueError(f"'{unknown[0]}' is neither [[device]] nor [[link]]")
    devices = [parse_device(entry) for entry in _entries(values, "device")]
    links = [parse_link(entry) for entry in _entries(values, "link")]
    aliases = {}
    for entry, device in zip(_entries(values, "device"), devices, strict=True):
        names = (device.name, *entry.get("aliases", ()))
        aliases.update({_normalized(str(name)): device.name for name in names})
    return DeviceTable({one.name: one for one in devices}, {one.name: one for one in links}, aliases)


def _entries(values: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    entries = values.get(key, [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError(f"{key} must be a list: write [[{key}]]")
    return entries


_DEVICE_KEYS = {
    "name",
    "aliases",
    "kind",
    "driver_name",
    "memory_gib",
    "memory_gb_per_s",
    "units",
    "peak_tflops",
    "achievable",
    "attention",
    "sustained",
    "devices_per_host",
    "nvlink_domain",
    "intra_host",
    "inter_host",
    "source",
}
_LINK_KEYS = {"name", "latency_us", "start_us", "gb_per_s", "efficiency", "source"}


def parse_device(entry: Mapping[str, Any]) -> Device:
    name = _name(entry, "device", _DEVICE_KEYS)
    number = _numbers(entry, f"the device {name}")
    driver_name = str(entry.get("driver_name", name))
    peaks = _peaks(entry, name, driver_name)
    kind = entry.get("kind", "gpu")
    if kind not in ("gpu", "cpu"):
        raise ValueError(f"kind of the device {name} must be gpu or cpu")
    achievable = _shares(entry.get("achievable", {}), f"achievable of the device {name}")
    attention = _shares(entry.get("attention", {}), f"attention of the device {name}")
    return Device(
        name,
        kind,
        peaks,
        achievable or dict.fromkeys(peaks, _DEFAULT_ACHIEVABLE),
        int(number("memory_gib") * 2**30),
        number("memory_gb_per_s") * 1e9,
        int(number("units", 1)),
        attention.get("forward", 0.4),
        attention.get("backward", 0.3),
        driver_name,
        int(number("devices_per_host", 8)),
        int(entry.get("nvlink_domain", 0)),
        str(entry.get("intra_host", "pcie4")),
        str(entry.get("inter_host", "ethernet-25")),
        str(entry.get("source", "")),
        _shares({"sustained": entry["sustained"]}, f"the device {name}")["sustained"] if "sustained" in entry else 0.0,
    )


def parse_link(entry: Mapping[str, Any]) -> FabricLink:
    name = _name(entry, "link", _LINK_KEYS)
    number = _numbers(entry, f"the link {name}")
    if (efficiency := number("efficiency", 0.8)) > 1:
        raise ValueError(f"efficiency of the link {name} must be at most 1")
    waits = {"latency_us": entry.get("latency_us", 10.0), "start_us": entry.get("start_us", 0.0)}
    for key, value in waits.items():
        if not _is_number(value) or value < 0:
            raise ValueError(f"{key} of the link {name} must be a number that is not negative")
    return FabricLink(
        name,
        waits["latency_us"] * 1e-6,
        number("gb_per_s") * 1e9,
        efficiency,
        str(entry.get("source", "")),
        waits["start_us"] * 1e-6,
    )


def _name(entry: Mapping[str, Any], kind: str, keys: set[str]) -> str:
    name = entry.get("name")
    if not isinstance(name, str) or not name.strip():
        raise ValueError(f"every {kind} needs a name")
    if unknown := sorted(set(entry) - keys):
        raise ValueError(f"the {kind} {name} has an unknown key '{unknown[0]}'")
    return name


def _peaks(entry: Mapping[str, Any], name: str, driver_name: str) -> dict[str, float]:
    own = entry.get("peak_tflops", {})
    if not isinstance(own, dict) or set(own) - set(PRECISIONS):
        raise ValueError(f"peak_tflops of the device {name} must be a table with keys of {', '.join(PRECISIONS)}")
    peaks = {}
    for precision in PRECISIONS:
        if precision in own:
            if not _is_number(own[precision]) or own[precision] <= 0:
                raise ValueError(f"peak_tflops of the device {name} must be above 0 for {precision}")
            peaks[precision] = own[precision] * 1e12
        elif precision in _DATASHEET_NAMES and (found := datasheet_flops(driver_name, _DATASHEET_NAMES[precision])):
            peaks[precision] = found
    if "fp32" not in peaks:
        raise ValueError(f"the device {name} needs peak_tflops = {{ fp32 = ..., bf16 = ... }}")
    return peaks


def _shares(values: Any, what: str) -> dict[str, float]:
    if not isinstance(values, dict) or not all(_is_number(value) and 0 < value <= 1 for value in values.values()):
        raise ValueError(f"{what} must be a table of numbers above 0 and at most 1")
    return {str(key): float(value) for key, value in values.items()}


def _numbers(entry: Mapping[str, Any], what: str) -> Callable[..., float]:
    """Reads a number above 0 of this entry."""

    def number(key: str, default: float | None = None) -> float:
        value = entry.get(key, default)
        if not _is_number(value) or not value > 0:
            raise ValueError(f"{key} of {what} must be a number above 0")
        return float(value)

    return number


def _is_number(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, int | float) and math.isfinite(value)
