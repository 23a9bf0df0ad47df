"""What hardware does a plan run on? A cluster: devices, the links inside and between hosts, price and failures.

``64xh100`` names one from the built-in table; a TOML file states everything. Invariant: a cluster that exists here can
be built: whole hosts, bandwidths above zero, and a link between hosts wherever there are several.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from closeranks.core.errors import ConfigError, Problem, UserError
from closeranks.core.registry import did_you_mean
from closeranks.core.system.regular_file import read_text
from closeranks.facts.calibration import Calibration
from closeranks.facts.device_table import Device as Device
from closeranks.facts.device_table import DeviceTable, built_in_devices, load_device_table, parse_device, parse_link
from closeranks.facts.device_table import FabricLink as FabricLink
from closeranks.facts.failures.failure_rates import DEFAULT_TABLE
from closeranks.facts.prices import load_prices

_MOST_DEVICES = 10_000_000
_MOST_ON_HOST = 1024
_MOST_BYTES = 1 << 20
_KEYS = {
    "device",
    "num_devices",
    "devices_per_host",
    "intra_host",
    "inter_host",
    "rails",
    "nvlink_domain",
    "price_per_hour",
    "currency",
    "failures",
    "table",
    "disk_gb_per_s",
}
_EXAMPLE = 'Write one such as "64xh100", or a file with device, num_devices and links (docs/plan-models.md).'


@dataclass(frozen=True, slots=True)
class Cluster:
    device: Device
    num_devices: int
    devices_per_host: int
    intra_host: FabricLink
    inter_host: FabricLink | None = None
    """The link of one network card; None: one host only."""
    rails: int = 0
    """Network cards per host; 0: one per device."""
    nvlink_domain: int = 0
    """Devices that share the link ``intra_host``, if more than those of one host."""
    price_per_hour: float | None = None
    """Of one device."""
    currency: str = "USD"
    failures: str = DEFAULT_TABLE
    """A table of ``facts.failures``, or a file."""
    disk_bytes_per_s: float = 1e9
    """What one host writes durably."""
    calibration: Calibration | None = None
    """What was measured of one of its hosts: it counts for more than the datasheet."""

    def __post_init__(self) -> None:
        if problems := tuple(_problems(self)):
            raise ConfigError([Problem("cluster", what, fix) for what, fix in problems])

    @property
    def num_hosts(self) -> int:
        return -(-self.num_devices // self.devices_per_host)

    @property
    def devices_on_host(self) -> int:
        """Of the first host, which is full where there are several."""
        return min(self.num_devices, self.devices_per_host)

    @property
    def domain_size(self) -> int:
        """Devices that reach one another over the link ``intra_host``."""
        return min(self.num_devices, max(self.devices_on_host, self.nvlink_domain))

    @property
    def inter_host_bytes_per_s(self) -> float:
        """Between hosts, of one device when all of its host send; with efficiency. The whole link of one host if
        there is no other."""
        if self.inter_host is None:
            return self.intra_host.effective_bytes_per_s
        rails = self.rails or self.devices_per_host
        return self.inter_host.effective_bytes_per_s * rails / self.devices_per_host

    def __str__(self) -> str:
        return f"{self.num_devices}x{self.device.name.lower()}"


def _problems(cluster: Cluster) -> Iterator[tuple[str, str]]:
    count, per_host = cluster.num_devices, cluster.devices_per_host
    if not 1 <= count <= _MOST_DEVICES:
        yield f"it has {count:,} devices", f"Name from 1 to {_MOST_DEVICES:,} devices."
    if not 1 <= per_host <= _MOST_ON_HOST:
        yield f"its hosts have {per_host:,} devices", f"A host has from 1 to {_MOST_ON_HOST:,} devices."
    elif 1 <= per_host < count:
        if over := count % per_host:
            near = f"{count - over:,} or {count - over + per_host:,}"
            yield (
                f"{count:,} devices do not fill hosts of {per_host}",
                f"Name a multiple of {per_host}, such as {near}.",
            )
        if cluster.inter_host is None:
            yield f"its {cluster.num_hosts:,} hosts have no link between them", "Give it inter_host."
    for link in (cluster.intra_host, cluster.inter_host):
        if link is not None and not 0 < link.effective_bytes_per_s < math.inf:
            yield f"its link {link.name} carries {link.bytes_per_s:g} bytes/s", "Name a bandwidth above 0."
        if link is not None and not 0 <= link.latency_s < math.inf:
            yield f"the latency of its link {link.name} is {link.latency_s:g} s", "Name a latency of 0 or more."
    if not 0 <= cluster.rails <= _MOST_ON_HOST:
        yield f"its hosts have {cluster.rails:,} network cards", f"Name from 1 to {_MOST_ON_HOST:,} rails."
    if not 0 <= cluster.nvlink_domain <= _MOST_DEVICES:
        yield f"{cluster.nvlink_domain:,} devices share its fast link", "Name 1 or more, or leave nvlink_domain out."
    if cluster.price_per_hour is not None and not 0 <= cluster.price_per_hour < math.inf:
        yield f"an hour of a device costs {cluster.price_per_hour:g}", "Name a price_per_hour of 0 or more."
    if not 0 < cluster.disk_bytes_per_s < math.inf:
        yield f"its disks write {cluster.disk_bytes_per_s:g} bytes/s", "Name a disk_gb_per_s above 0."


def parse_cluster(text: str, table: DeviceTable | None = None) -> Cluster:
    """Reads ``64xh100``, in any case and with spaces; ``h100`` is one device."""
    devices = table or built_in_devices()
    if reversed_ := re.fullmatch(r"\s*([A-Za-z].*?)\s*[xX×*:]\s*([\d_,]+)\s*", text):
        name, count = reversed_.groups()
        if devices.find(name) is not None and devices.find(text) is None:
            what = f"'{text}' has the number of devices after their name"
            raise ConfigError([Problem("cluster", what, f'Write "{count}x{name.lower()}".')])
    match = re.fullmatch(r"\s*(?:(-?\d[\d_,]*)\s*[xX×]\s*)?([A-Za-z][A-Za-z0-9 ._-]*?)\s*", text)
    if match is None:
        raise ConfigError([Problem("cluster", f"'{text}' is not a cluster", _EXAMPLE)])
    count, name = match.groups()
    num_devices = int(re.sub(r"[_,]", "", count)[:20]) if count else 1
    return cluster_of(devices.device(name), num_devices, table=table)


def cluster_of(device: Device, num_devices: int, *, table: DeviceTable | None = None) -> Cluster:
    """The usual cluster of this device: the links and hosts that its entry in the table names."""
    links = table or built_in_devices()
    per_host = device.devices_per_host if num_devices > device.devices_per_host else max(1, num_devices)
    price = load_prices().price_of(device.driver_name)
    return Cluster(
        device,
        num_devices,
        per_host,
        links.link(device.intra_host),
        links.link(device.inter_host),
        nvlink_domain=device.nvlink_domain,
        price_per_hour=price.per_hour if price else None,
        currency=price.currency if price else "USD",
    )


def with_devices(cluster: Cluster, num_devices: int) -> Cluster:
    """The same kind of cluster with another number of devices."""
    full = max(cluster.devices_per_host, cluster.device.devices_per_host)
    per_host = cluster.devices_per_host if cluster.num_hosts > 1 else full
    per_host = per_host if num_devices > per_host else max(1, num_devices)
    rails = cluster.rails if per_host == cluster.devices_per_host else 0
    return replace(cluster, num_devices=num_devices, devices_per_host=per_host, rails=rails)


def full_hosts(cluster: Cluster, num_devices: int) -> int:
    """At least so many devices: as many as fill the cluster's hosts."""
    full = cluster.devices_per_host if cluster.num_hosts > 1 else cluster.device.devices_per_host
    return num_devices if num_devices <= full else -(-num_devices // full) * full


def calibrated(cluster: Cluster, calibration: Calibration) -> Cluster:
    """The cluster with what was measured of one of its hosts; ``ConfigError`` for what another kind of device did."""
    measured, device = calibration.device, cluster.device
    known = {one.driver_name: one for one in built_in_devices().devices.values() if one.driver_name}
    if calibration.kind != device.kind or known.get(measured, device).name != device.name:
        what = f"it was measured on another device ({measured or calibration.kind}) than {device.name}"
        raise ConfigError(
            [Problem("--calibration", what, "Run `closeranks plan calibrate` on the device to plan for.")]
        )
    return replace(
        cluster, calibration=calibration, disk_bytes_per_s=calibration.disk_bytes_per_s or cluster.disk_bytes_per_s
    )


def find_cluster(text: str, num_devices: int = 0) -> Cluster:
    """A cluster file if the text is a path, else a short name such as ``64xh100``; ``UserError`` for one that cannot
    be used. ``num_devices``: how many of this kind of device; 0: as the cluster says."""
    is_path = text.endswith(".toml") or "/" in text or Path(text).is_file()
    try:
        cluster = load_cluster(Path(text)) if is_path else parse_cluster(text)
        return with_devices(cluster, num_devices) if num_devices else cluster
    except ConfigError as error:
        sentences = " ".join(f"{problem.what}. {problem.fix}".strip() for problem in error.problems)
        raise UserError(f"the cluster {text} cannot be used: {sentences}" if text.strip() else sentences) from error


def load_cluster(path: Path) -> Cluster:
    try:
        return _cluster(tomllib.loads(read_text(path, _MOST_BYTES)), path.parent)
    except OSError as error:
        raise UserError(f"the cluster {path} cannot be read: {error.strerror or error}", _EXAMPLE) from error
    except UnicodeDecodeError as error:
        raise UserError(f"the cluster {path} cannot be used: it is not a text file", _EXAMPLE) from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"the cluster {path} cannot be used: {error}", _EXAMPLE) from error


def _cluster(values: Mapping[str, Any], folder: Path) -> Cluster:
    if unknown := sorted(set(values) - _KEYS):
        raise ValueError(f"there is no key '{unknown[0]}'. {did_you_mean(unknown[0], _KEYS)}")
    table = built_in_devices()
    if "table" in values:
        table = table.with_entries(load_device_table(folder / _text(values, "table", "")))
    entry = values.get("device")
    if not isinstance(entry, str | dict):
        raise ValueError('it needs a device, such as device = "h100"')
    device = parse_device(entry) if isinstance(entry, dict) else table.device(entry)
    count = _whole(values, "num_devices", 1)
    usual = cluster_of(device, max(1, count), table=table)
    if values.get("rails") == 0:
        raise ValueError("rails is 0: name the network cards of a host, or leave rails out for one per device")
    failures = _text(values, "failures", usual.failures)
    return replace(
        usual,
        num_devices=count,
        devices_per_host=_whole(values, "devices_per_host", usual.devices_per_host),
        intra_host=_link(values, "intra_host", usual.intra_host, table),
        inter_host=_link(values, "inter_host", usual.inter_host, table),
        rails=_whole(values, "rails", 0),
        nvlink_domain=_whole(values, "nvlink_domain", usual.nvlink_domain),
        price_per_hour=_number(values, "price_per_hour", usual.price_per_hour),
        currency=_text(values, "currency", usual.currency),
        failures=str(folder / failures) if failures.endswith(".toml") else failures,
        disk_bytes_per_s=_number(values, "disk_gb_per_s", usual.disk_bytes_per_s / 1e9) * 1e9,
    )


def _link(values: Mapping[str, Any], key: str, usual: FabricLink | None, table: DeviceTable) -> Any:
    value = values.get(key)
    if value is None:
        return usual
    if isinstance(value, dict):
        return parse_link({"name": key, **value})
    return table.link(_text(values, key, ""))


def _text(values: Mapping[str, Any], key: str, default: str) -> str:
    value = values.get(key, default)
    if not isinstance(value, str):
        raise ValueError(f'{key} must be text, in quotes: {key} = "..."')
    return value


def _whole(values: Mapping[str, Any], key: str, default: int) -> int:
    value = values.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{key} must be a whole number")
    return value


def _number(values: Mapping[str, Any], key: str, default: Any) -> Any:
    value = values.get(key, default)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise ValueError(f"{key} must be a number")
    return value
