"""What hardware does a plan run on? A cluster: devices, the links inside and between hosts, price and failures.

``64xh100`` names one from the built-in table; a TOML file states everything. Invariant: a cluster that exists here can
be built: whole hosts, bandwidths above zero, and a link between hosts wherever there are several.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from closeranks.core.errors import ConfigError, Problem, UserError
from closeranks.core.system.regular_file import read_text
from closeranks.facts.calibration import Calibration
from closeranks.facts.device_table import Device as Device
from closeranks.facts.device_table import DeviceTable, built_in_devices, load_device_table, parse_device, parse_link
from closeranks.facts.device_table import FabricLink as FabricLink
from closeranks.facts.failures.failure_rates import DEFAULT_TABLE
from closeranks.facts.prices import load_prices

_MOST_DEVICES = 10_000_000
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
    disk_bytes_per_s: float = 2e9
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


def _problems(cluster: Cluster) -> list[tuple[str, str]]:
    found = []
    if not 1 <= cluster.num_devices <= _MOST_DEVICES:
        found.append((f"it has {cluster.num_devices} devices", f"Name from 1 to {_MOST_DEVICES:,} devices."))
    if cluster.devices_per_host < 1:
        found.append((f"its hosts have {cluster.devices_per_host} devices", "A host has at least 1 device."))
    if found:
        return found
    if cluster.num_devices > cluster.devices_per_host:
        if over := cluster.num_devices % cluster.devices_per_host:
            fix = f"Name a multiple of {cluster.devices_per_host}, such as {cluster.num_devices - over}."
            found.append((f"{cluster.num_devices} devices do not fill hosts of {cluster.devices_per_host}", fix))
        if cluster.inter_host is None:
            found.append((f"its {cluster.num_hosts} hosts have no link between them", "Give it inter_host."))
    for link in (cluster.intra_host, cluster.inter_host):
        if link is not None and not link.effective_bytes_per_s > 0:
            found.append((f"its link {link.name} carries {link.bytes_per_s:g} bytes/s", "Name a bandwidth above 0."))
        if link is not None and link.latency_s < 0:
            found.append((f"the latency of its link {link.name} is negative", "Name a latency of 0 or more."))
    if cluster.rails < 0:
        found.append((f"its hosts have {cluster.rails} network cards", "Name 1 or more rails."))
    if cluster.price_per_hour is not None and not cluster.price_per_hour >= 0:
        found.append((f"an hour of a device costs {cluster.price_per_hour:g}", "Name a price of 0 or more."))
    return found


def parse_cluster(text: str, table: DeviceTable | None = None) -> Cluster:
    """Reads ``64xh100``; ``h100`` is one device."""
    match = re.fullmatch(r"\s*(?:(\d[\d_,]*)\s*x\s*)?([A-Za-z][^,]*?)\s*", text)
    if match is None:
        raise ConfigError([Problem("cluster", f"'{text}' is not a cluster", _EXAMPLE)])
    count, name = match.groups()
    num_devices = int(re.sub(r"[_,]", "", count)[:20]) if count else 1
    return cluster_of((table or built_in_devices()).device(name), num_devices, table=table)


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


def find_cluster(text: str) -> Cluster:
    """A cluster file if the text is a path of one, else a short name such as ``64xh100``."""
    return load_cluster(Path(text)) if text.endswith(".toml") or Path(text).is_file() else parse_cluster(text)


def load_cluster(path: Path) -> Cluster:
    try:
        return _cluster(tomllib.loads(read_text(path, _MOST_BYTES)), path.parent)
    except OSError as error:
        raise UserError(f"the cluster {path} cannot be read: {error.strerror or error}", _EXAMPLE) from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"the cluster {path} cannot be used: {error}", _EXAMPLE) from error


def _cluster(values: Mapping[str, Any], folder: Path) -> Cluster:
    if unknown := sorted(set(values) - _KEYS):
        raise ValueError(f"'{unknown[0]}' is none of {', '.join(sorted(_KEYS))}")
    table = built_in_devices()
    if "table" in values:
        table = table.with_entries(load_device_table(folder / str(values["table"])))
    entry = values.get("device")
    if not isinstance(entry, str | dict):
        raise ValueError('it needs a device, such as device = "h100"')
    device = parse_device(entry) if isinstance(entry, dict) else table.device(entry)
    count = _whole(values, "num_devices", 1)
    usual = cluster_of(device, count, table=table)
    return replace(
        usual,
        devices_per_host=_whole(values, "devices_per_host", usual.devices_per_host),
        intra_host=_link(values.get("intra_host"), usual.intra_host, table),
        inter_host=_link(values.get("inter_host"), usual.inter_host, table),
        rails=_whole(values, "rails", 0),
        nvlink_domain=_whole(values, "nvlink_domain", usual.nvlink_domain),
        price_per_hour=_number(values, "price_per_hour", usual.price_per_hour),
        currency=str(values.get("currency", usual.currency)),
        failures=str(values.get("failures", usual.failures)),
        disk_bytes_per_s=(_number(values, "disk_gb_per_s", None) or usual.disk_bytes_per_s / 1e9) * 1e9,
    )


def _link(value: Any, usual: FabricLink | None, table: DeviceTable) -> Any:
    if value is None:
        return usual
    if isinstance(value, dict):
        return parse_link({"name": "own link", **value})
    return table.link(str(value))


def _whole(values: Mapping[str, Any], key: str, default: int) -> int:
    value = values.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{key} must be a whole number")
    return value


def _number(values: Mapping[str, Any], key: str, default: float | None) -> float | None:
    value = values.get(key, default)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise ValueError(f"{key} must be a number")
    return value
