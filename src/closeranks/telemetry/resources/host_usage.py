"""What does the whole host use: processors, memory, swap, page cache, disks and network?

Programs that are not ours count too: that is how a noisy neighbour shows. In a container some of it is the host's, some
the container's own, as the kernel shows it. Only physical disks and network cards are counted, unless there are none:
what goes through a virtual device (loop, device mapper, bridge) would count twice. RDMA traffic does not appear here,
as the kernel does not see it.
"""

from __future__ import annotations

import os
import re
from functools import cache
from typing import Any

import psutil

from closeranks.telemetry.resources.proc_files import text_of
from closeranks.telemetry.resources.reading import Reading

_STACKED_DISK = re.compile(r"(loop|ram|zram|dm-|md|nbd)\d")


def read_host() -> Reading:
    spent, memory, swap = psutil.cpu_times(), psutil.virtual_memory(), psutil.swap_memory()
    disks, network = _disks(), _network()
    busy_s = spent.user + spent.nice + spent.system + spent.irq + spent.softirq
    return Reading(
        totals={
            "swap_in_bytes": swap.sin,
            "swap_out_bytes": swap.sout,
            "disk_read_bytes": sum(disk.read_bytes for disk in disks.values()),
            "disk_write_bytes": sum(disk.write_bytes for disk in disks.values()),
            **network,
        },
        rates={"cpus": busy_s, "steal_cpus": spent.steal, "io_wait_cpus": spent.iowait},
        busiest={"disk_busy_share": {name: disk.busy_time / 1000 for name, disk in disks.items()}},
        levels={
            "num_cpus": psutil.cpu_count() or 1,
            "load": os.getloadavg()[0],
            "page_cache_bytes": memory.cached,
            "available_bytes": memory.available,
        },
    )


def _disks() -> dict[str, Any]:
    """Whole disks; partitions would count twice."""
    found = psutil.disk_io_counters(perdisk=True, nowrap=False) or {}
    return {name: disk for name, disk in found.items() if _is_physical_disk(name)}


@cache
def _is_physical_disk(name: str) -> bool:
    return os.path.isdir(f"/sys/block/{name}") and _STACKED_DISK.match(name) is None


def _network() -> dict[str, float]:
    found = psutil.net_io_counters(pernic=True, nowrap=False)
    cards = [name for name in found if os.path.exists(f"/sys/class/net/{name}/device")]
    used = [found[name] for name in cards or (name for name in found if name != "lo")]
    counted: dict[str, float] = {
        "net_sent_bytes": sum(card.bytes_sent for card in used),
        "net_received_bytes": sum(card.bytes_recv for card in used),
    }
    retransmitted = retransmits(text_of("/proc/net/snmp"))
    return counted if retransmitted is None else {**counted, "net_retransmits": retransmitted}


def retransmits(snmp: str) -> int | None:
    """TCP segments that had to be sent again; the table has a line of names and one of values."""
    lines = [line.split() for line in snmp.splitlines() if line.startswith("Tcp:")]
    return int(dict(zip(*lines, strict=False))["RetransSegs"]) if len(lines) == 2 else None
