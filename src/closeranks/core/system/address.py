"""Parses ``HOST:PORT`` addresses and opens listening sockets.

Invariant: the port that is reported is the port that the socket holds.
"""

from __future__ import annotations

import errno
import socket
from ipaddress import ip_address
from typing import NamedTuple

from closeranks.core.errors import SetupError

_BACKLOG = 1024


class Address(NamedTuple):
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str, *, least_port: int = 1) -> Address:
    """``lead:29400``, ``10.0.0.1:29400`` or ``[fd00::1]:29400``."""
    host, _, port = text.strip().rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise SetupError(f"'{text}' is not an address", "Write an IPv6 address in brackets, as in [fd00::1]:29400.")
    if not host or not (port.isascii() and port.isdigit()) or not least_port <= int(port) < 65536:
        raise SetupError(f"'{text}' is not an address", "Write HOST:PORT, as in lead.example:29400.")
    return Address(host, int(port))


def parse_listen(text: str) -> Address:
    """The same for an address to listen on: the port may be 0 (any free one) or left out; without a port, an IPv6
    address needs no brackets."""
    text = text.strip()
    is_bare = ":" not in text or (text.startswith("[") and text.endswith("]")) or _is_ipv6(text)
    if is_bare and text.strip("[]"):
        return Address(text.strip("[]"), 0)
    return parse_address(text, least_port=0)


def _is_ipv6(text: str) -> bool:
    try:
        socket.inet_pton(socket.AF_INET6, text)
    except OSError:
        return False
    return True


def plain_host(host: str) -> str:
    """The IPv4 form of an IPv4-mapped IPv6 address, which is how a dual-stack socket shows an IPv4 client."""
    return host.removeprefix("::ffff:") if "." in host else host


def listen_on(host: str, port: int, *, what: str = "the control channel") -> socket.socket:
    """A non-blocking listening socket (port 0: any free one); ``what`` listens there, for the error."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (socket.gaierror, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not a name"
        fix = "Listen on an address of this machine, or on 0.0.0.0 for all of them."
        raise SetupError(f"the host '{host}' does not resolve ({why})", fix) from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port with connections in TIME_WAIT is free
        listener.bind(address)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise _setup_error(error, Address(host, port), what) from None
    return listener


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what listens on ``host``. A name is not looked up: it may mean another
    address tomorrow."""
    try:
        return host == "localhost" or ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


def _setup_error(error: OSError, address: Address, listener: str) -> SetupError:
    what = f"{listener} cannot listen on {address} ({error.strerror})"
    match error.errno:
        case errno.EADDRINUSE:
            return SetupError(what, "Choose another port (0 takes any free one), or stop the process that holds it.")
        case errno.EADDRNOTAVAIL:
            return SetupError(what, "Choose an address of this machine, or 0.0.0.0 for all of them.")
        case errno.EACCES:
            return SetupError(what, "Choose a port of 1024 or above.")
    return SetupError(what, "Choose another address.")
