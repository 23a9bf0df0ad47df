"""Which transports does NCCL really use? Read from what it prints with ``NCCL_DEBUG=INFO`` (docs/nccl.md).

    n1:983:1261 [2] NCCL INFO comm 0x55f0 rank 2 nranks 16 cudaDev 2 busId 49000 commId 0x5ae7 - Init START
    n1:983:1261 [2] NCCL INFO Channel 00/0 : 2[2] -> 3[3] via P2P/CUMEM
    n1:988:1266 [7] NCCL INFO Channel 02/0 : 7[7] -> 8[0] [send] via NET/IB/2/GDRDMA

Pure: lines in, one value out. Ranks in these lines are numbered within a communicator, and each process prints its own
end, so the host of a rank is known by communicator. Invariant: lines in no known form are ignored, however damaged; the
formats of NCCL 2.4 to 2.30 are read.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

_LINE_CHARS = 1000
"""NCCL prints no longer lines about channels."""
_PREFIX = re.compile(r"(?P<host>[^\s:]{1,253}):(?P<pid>\d{1,10}):\d{1,10} \[-?\d{1,4}\] NCCL INFO ", re.ASCII)
_END = r"(\d{1,7})(?:\[\w+\])?"
_CHANNEL = re.compile(
    rf"(?:Channel|Ring) (\d+)(?:/\d+)? : {_END} -> {_END}(?: \[(send|receive)\])? "
    r"via (.+?)(?: comm (0x[0-9a-f]+).*)?$",
    re.ASCII,
)
_COMM = re.compile(r"\bcomm (0x[0-9a-f]+) rank (\d{1,7}) n[rR]anks (\d{1,7})(?:.* commId (0x[0-9a-f]+))?", re.ASCII)
_SETTING = re.compile(r"\b(NCCL_\w+) set by environment to (\S+?)\.?$", re.ASCII)
_VERSION = re.compile(r"NCCL version (\d[\w.+]*)", re.ASCII)
_IB_FOUND = re.compile(r"NET/IB\w* ?: Using \[0\]")
_NETWORKS = ("NET", "COLLNET")
SOCKET = "NET/Socket"


@dataclass(frozen=True, slots=True)
class NcclTransport:
    """One way that NCCL sends, and how much of it there is."""

    via: str
    """As NCCL calls it, without the number of the device: ``P2P/CUMEM``, ``SHM``, ``NET/IB``, ``NET/Socket``."""
    has_gpudirect: bool
    """The network card reads and writes the memory of the GPU itself (``GDRDMA``)."""
    is_between_hosts: bool
    num_pairs: int
    """Pairs of sender and receiver,"""
    num_channels: int
    """and the channels of all of them."""
    example: str
    """One channel, in NCCL's words."""

    def __str__(self) -> str:
        direct = " with GPUDirect RDMA" if self.has_gpudirect else ""
        return f"{self.via}{direct}, {self.num_pairs} pair{'s' * (self.num_pairs != 1)}"


@dataclass(frozen=True, slots=True)
class NcclLog:
    transports: tuple[NcclTransport, ...] = ()
    """Those between hosts first, the most used first."""
    version: str = ""
    has_ib: bool = False
    """A process found InfiniBand or RoCE devices."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Variables that NCCL took from the environment."""

    def __str__(self) -> str:
        places = []
        for words, is_between in (("between hosts", True), ("within a host", False)):
            if found := [str(one) for one in self.transports if one.is_between_hosts == is_between]:
                places.append(f"{words} {'; '.join(found)}")
        return " | ".join(places) + (f" (NCCL {self.version})" if self.version else "")


@dataclass(frozen=True, slots=True)
class _Channel:
    comm: str
    number: int
    sender: int
    receiver: int
    via: str


def parse_nccl_log(lines: Iterable[str]) -> NcclLog | None:
    """``lines``: of all processes, each process's own in order. None if NCCL told of no channel."""
    seen = _Seen()
    for line in lines:
        if "NCCL" in line:
            seen.read(line[:_LINE_CHARS].rstrip())
    if not seen.channels:
        return None
    return NcclLog(seen.transports(), seen.version, seen.has_ib, seen.settings)


class _Seen:
    """What the lines have told so far."""

    def __init__(self) -> None:
        self.version, self.has_ib = "", False
        self.settings: dict[str, str] = {}
        self.channels: dict[_Channel, None] = {}
        self._hosts: dict[tuple[str, int], str] = {}
        """By communicator and rank."""
        self._comms: dict[tuple[str, str], str] = {}
        """By process and address; under the address "", the newest of the process."""

    def read(self, line: str) -> None:
        if found := _VERSION.search(line):
            self.version = found[1]
        if not (prefix := _PREFIX.search(line)):
            return
        host, process, text = prefix["host"], f"{prefix['host']}:{prefix['pid']}", line[prefix.end() :]
        self.has_ib |= _IB_FOUND.search(text) is not None
        if found := _SETTING.search(text):
            self.settings[found[1]] = found[2]
        elif found := _COMM.search(text):
            self._read_comm(host, process, found)
        elif found := _CHANNEL.match(text):
            self._read_channel(host, process, found)

    def _read_comm(self, host: str, process: str, found: re.Match[str]) -> None:
        address, rank, num_ranks, number = found.groups()
        comm = number or self._comms.get((process, address), f"of {num_ranks} ranks")
        self._comms[process, address] = self._comms[process, ""] = comm
        self._hosts[comm, int(rank)] = host

    def _read_channel(self, host: str, process: str, found: re.Match[str]) -> None:
        number, sender, receiver, end, via, address = found.groups()
        newest = self._comms.get((process, ""), "")
        comm = self._comms.get((process, address), newest) if address else newest
        self._hosts.setdefault((comm, int(receiver if end == "receive" else sender)), host)
        self.channels.setdefault(_Channel(comm, int(number), int(sender), int(receiver), via))

    def transports(self) -> tuple[NcclTransport, ...]:
        groups: dict[tuple[str, bool, bool], list[_Channel]] = defaultdict(list)
        for one in self.channels:
            groups[transport_name(one.via), "/GDRDMA" in one.via, self._is_between_hosts(one)].append(one)
        found = [
            NcclTransport(
                *key,
                num_pairs=len({(one.comm, one.sender, one.receiver) for one in own}),
                num_channels=len(own),
                example=f"Channel {own[0].number:02d} : {own[0].sender} -> {own[0].receiver} via {own[0].via}",
            )
            for key, own in groups.items()
        ]
        return tuple(sorted(found, key=lambda one: (not one.is_between_hosts, -one.num_channels, one.via)))

    def _is_between_hosts(self, one: _Channel) -> bool:
        """Memory is shared within a host; a network is taken to lead to another one, unless both ends are known."""
        if not one.via.startswith(_NETWORKS):
            return False
        ends = [self._hosts.get((one.comm, rank)) for rank in (one.sender, one.receiver)]
        return None in ends or ends[0] != ends[1]


def transport_name(via: str) -> str:
    """``NET/IB/2(1)/GDRDMA/Shared`` -> ``NET/IB``, ``P2P/indirect/3[3]`` -> ``P2P/indirect``."""
    if via.startswith("SHM") or "shared memory" in via:
        return "SHM"
    return "/".join(via.split("/")[:2])[:40]


def nccl_json(log: NcclLog | None) -> dict[str, Any] | None:
    if log is None:
        return None
    return {
        "version": log.version,
        "transports": [
            {
                "via": one.via,
                "gpudirect": one.has_gpudirect,
                "between_hosts": one.is_between_hosts,
                "num_pairs": one.num_pairs,
                "num_channels": one.num_channels,
            }
            for one in log.transports
        ],
        "settings": dict(log.settings),
    }
