"""Which network interface has an address, and which address would others reach this host by?

Invariant: nothing is sent; the kernel's own tables are read.
"""

from __future__ import annotations

import socket

import psutil

from closeranks.core.errors import SetupError

WILDCARDS = ("0.0.0.0", "::", "")
_FAR = "192.0.2.1"
"""Of a network that is for documentation alone: the way there is the way anywhere."""


def interface_of(host: str) -> str:
    """The interface of an address of this host, or of a name for one."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise SetupError(f"the host '{host}' does not resolve ({error.strerror})", _FIX) from None
    addresses = {str(address[0]).partition("%")[0] for *_, address in found}
    if all(address == "::1" or address.startswith("127.") for address in addresses):
        return "lo"
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] in addresses for entry in entries):
            return name
    raise SetupError(f"no network interface of this host has the address {host}", _FIX)


_FIX = "Set agent.host, or the address to listen on, to one of this machine's own."


def own_address() -> str:
    """The address of this host from which packets to elsewhere leave; loopback where nothing leads away."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((_FAR, 9))
        except OSError:
            return _first_address()
        return str(probe.getsockname()[0])


def _first_address() -> str:
    """Without a default route: of the first interface that is not loopback."""
    for entries in psutil.net_if_addrs().values():
        for entry in entries:
            if entry.family == socket.AF_INET and not entry.address.startswith("127."):
                return str(entry.address)
    return "127.0.0.1"
