"""Finds the network interface of an address, and the address by which others reach this host.

Invariant: nothing is sent; only the kernel's own tables are read.
"""

from __future__ import annotations

import socket

import psutil

from closeranks.core.errors import SetupError

WILDCARDS = ("0.0.0.0", "::", "")
_REMOTE_ADDRESS = "192.0.2.1"
"""An address from a network reserved for documentation: the route to it is the default route."""


def interface_of(host: str) -> str:
    """The interface that holds an address of this host, given as an address or a host name."""
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
    """The source address of packets that leave this host; loopback if there is no route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((_REMOTE_ADDRESS, 9))
        except OSError:
            return _first_address()
        return str(probe.getsockname()[0])


def _first_address() -> str:
    """Without a default route: the address of the first interface that is not loopback."""
    for entries in psutil.net_if_addrs().values():
        for entry in entries:
            if entry.family == socket.AF_INET and not entry.address.startswith("127."):
                return str(entry.address)
    return "127.0.0.1"
