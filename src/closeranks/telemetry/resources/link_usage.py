"""How fast does this process send to other hosts while it has something to send? From the kernel's counters of its
TCP connections.

The kernel counts for each connection the bytes that were acknowledged and the time in which there was something to
send. Their ratio is the speed of the way there, however rarely a rank sends; waiting for a receiver that does not read
is left out. Connections within a host are not counted. RDMA does not appear here: the kernel does not see it.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from struct import Struct, error

from closeranks.telemetry.resources.reading import Reading

_TCP_INFO_BYTES = 192
_ACKED_BYTES, _BUSY_US, _RECEIVER_US = 120, 168, 176
"""Where ``struct tcp_info`` of Linux has tcpi_bytes_acked, tcpi_busy_time and tcpi_rwnd_limited."""
_COUNTER = Struct("=Q")
_MOST_SOCKETS = 256
_LEAST_BYTES, _LEAST_SHARE = 1 << 18, 0.01
"""Sent in an interval, and the share of it that this took: less says nothing about speed."""
_BYTES, _BUSY_S = " bytes", " busy_s"


def read_links() -> Reading:
    """By address of the other host. The subject is the address of this one."""
    totals: dict[str, float] = {}
    own = set()
    for here, there, sent_bytes, busy_s in _connections():
        if here != there:
            own.add(here)
            totals[there + _BYTES] = totals.get(there + _BYTES, 0) + sent_bytes
            totals[there + _BUSY_S] = totals.get(there + _BUSY_S, 0) + busy_s
    return Reading(totals, subject=min(own, default=""))


def link_speeds(used: Mapping[str, float], seconds: float) -> dict[str, float]:
    """Bytes per second to each address, from what ``used_between`` makes of two readings."""
    found: dict[str, float] = {}
    for name, sent in used.items():
        there = name.removesuffix(_BYTES)
        busy_s = used.get(there + _BUSY_S, 0.0)
        if there != name and sent >= _LEAST_BYTES and busy_s >= _LEAST_SHARE * seconds:
            found[there] = round(sent / busy_s)
    return found


def _connections() -> Iterator[tuple[str, str, int, float]]:
    """Addresses here and there, bytes that were received there, and the time in which there was something to send."""
    if sys.platform != "linux":
        return
    for fd in _socket_fds():
        with suppress(OSError, ValueError, error), socket.socket(fileno=os.dup(fd)) as one:
            if one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM:
                here, there = (str(end[0]).removeprefix("::ffff:") for end in (one.getsockname(), one.getpeername()))
                info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
                sent, busy_us, receiver_us = (
                    _COUNTER.unpack_from(info, place)[0] for place in (_ACKED_BYTES, _BUSY_US, _RECEIVER_US)
                )
                yield here, there, sent, max(0, busy_us - receiver_us) / 1e6


def _socket_fds() -> Iterator[int]:
    num = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                num += 1
                if num > _MOST_SOCKETS:
                    return
                yield int(name)
