"""On which cluster was a published run measured? Devices, hosts, and the network that the row's remarks name.

Invariant: what a row does not say is what the table of devices says is usual for its GPU; an unknown GPU is refused.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from math import gcd

from closeranks.core.errors import ConfigError
from closeranks.facts.cluster import Cluster, FabricLink, cluster_of
from closeranks.facts.device_table import Device, DeviceTable, built_in_devices
from closeranks.plan.validation.run_table import PublishedRun

_GIGABITS = {"EDR": 100, "HDR": 200, "NDR": 400, "XDR": 800, "OPA": 100, "OMNI": 100}
_KNOWN = {"jean-zay": 400, "jean zay": 400, "bigscience": 400, "selene": 1600}
"""Gb/s of one host of clusters that sources name: 4 x Omni-Path 100, 8 x HDR."""
_SAME_MEMORY = 0.1
"""Vendors count GB, drivers GiB without what is reserved."""


def cluster_of_run(run: PublishedRun) -> Cluster | str:
    """The reason if the hardware is not known."""
    device = _device(run.gpu)
    if device is None:
        return f"the table of devices has no '{run.gpu}'"
    per_host = run.gpus_per_node or device.devices_per_host
    if run.gpu_count % per_host and run.gpu_count > per_host:
        per_host = gcd(run.gpu_count, per_host)
    try:
        usual = cluster_of(device, run.gpu_count)
        found = replace(usual, devices_per_host=min(per_host, run.gpu_count))
        return _with_network(found, run)
    except ConfigError as error:
        return error.problems[0].what


_PLAIN = re.compile(r"sxm\d?|oam|hbm\w+|gpus?|tensor|core|nvl72", re.IGNORECASE)
"""Words of a GPU's name that do not change which device of the table it is."""
_MARKS = re.compile(r"\d+ ?GB|PCIe|\bNVL\b", re.IGNORECASE)


@cache
def _device(name: str) -> Device | None:
    """The device that the words of the name describe: H100-SXM5-80GB is an H100. None if a word says that it is
    another: PCIe, NVL, or a memory that the device does not have."""
    # Of remarks in parentheses only those count that can name another device.
    name = re.sub(r"\(.*?\)", lambda found: " ".join(_MARKS.findall(found.group())), name)
    plain = re.sub(r"^\s*\d+\s*[x×]\s*|\b(NVIDIA|AMD|Tesla|Instinct|[DH]GX(-\d)?)\b", " ", name, flags=re.IGNORECASE)
    spaced = " ".join(re.split(r"[-_ /,()]+", plain))
    words = re.sub(r"(\d) GB", r"\1GB", spaced, flags=re.IGNORECASE).split()
    if not words:
        return None
    table = built_in_devices()
    for length in range(len(words), 0, -1):
        found = _known("-".join(words[:length]), table)
        if found is not None:
            break
    else:
        return None
    # A memory or a form factor that comes later, as in A100-SXM4-40GB, may name another device.
    marks = [word for word in words[1:] if not _PLAIN.fullmatch(word)]
    whole = _known("-".join([words[0], *sorted(marks, key=lambda word: not word[0].isdigit())]), table)
    fits = all(_describes(found, word) for word in words[length:])
    return whole or (found if fits else None)


def _known(name: str, table: DeviceTable) -> Device | None:
    try:
        return table.device(name)
    except ConfigError:
        return None


def _describes(device: Device, word: str) -> bool:
    """Whether the device is still this one with a further word of its name."""
    if found := re.fullmatch(r"(\d+)GI?B?", word, re.IGNORECASE):
        return abs(int(found.group(1)) * 2**30 / device.memory_bytes - 1) < _SAME_MEMORY
    return bool(_PLAIN.fullmatch(word)) or (word.lower() == "pcie" and device.intra_host.startswith("pcie"))


def _with_network(cluster: Cluster, run: PublishedRun) -> Cluster:
    gigabits = _host_gigabits(run, cluster.devices_per_host)
    if gigabits is None or cluster.inter_host is None or cluster.num_hosts == 1:
        return cluster
    usual, is_roce = cluster.inter_host, "roce" in _remarks(run).lower()
    link = FabricLink(
        f"{gigabits} Gb/s of a host",
        12e-6 if is_roce else usual.latency_s,
        gigabits / 8 * 1e9 / cluster.devices_per_host,
        0.75 if is_roce else usual.efficiency,
        source=run.source,
    )
    return replace(cluster, inter_host=link, rails=cluster.devices_per_host)


def _host_gigabits(run: PublishedRun, per_host: int) -> float | None:
    remarks = _remarks(run)
    if found := re.search(r"(\d+)\s*[x×]\s*(\d+)\s*Gb", remarks):
        return float(found.group(1)) * float(found.group(2))
    if found := re.search(r"(\d+)\s*[x×]\s*(EDR|HDR|NDR|XDR|OPA|Omni)", remarks):
        return float(found.group(1)) * _GIGABITS[found.group(2).upper()]
    if found := re.search(r"(\d+)\s*Gb(?:ps|/s|it/s)?[^;,]*per GPU", remarks):
        return float(found.group(1)) * per_host
    if found := re.search(r"(\d+)\s*Gb(?:ps|/s|it/s)?[^;,]{0,12}\bnode", remarks):
        return float(found.group(1))
    text = f"{run.source} {remarks}".lower()
    return next((float(value) for name, value in _KNOWN.items() if name in text), None)


def _remarks(run: PublishedRun) -> str:
    return f"{run.table_or_figure}; {run.note}"
