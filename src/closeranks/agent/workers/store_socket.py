"""The listening socket of a generation's ``TCPStore``.

Rank 0 binds a plain socket itself and hands it to torch's store, so that a busy port is reported clearly before
anything distributed begins. Invariant: the socket stays bound from the announcement of its port on, so that no other
process can take the port in between.
"""

from __future__ import annotations

import errno
import socket

from closeranks.core.errors import SetupError


def bind_store(host: str, port: int) -> socket.socket:
    """A listening socket on ``host:port`` (0: any free port).

    Hand ``socket.detach()`` to ``TCPStore(..., master_listen_fd=...)``, which owns it from then on.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        fix = "Set agent.host to an address of this machine, such as 127.0.0.1."
        raise SetupError(f"the host '{host}' does not resolve ({error.strerror})", fix) from None
    listener = socket.socket(family, kind, protocol)
    try:
        # A port with connections in TIME_WAIT is free; one with a listener is not.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise _setup_error(error, host, port) from None
    return listener


def store_address(listener: socket.socket) -> str:
    """``host:port`` to announce."""
    host, port = listener.getsockname()[:2]
    return f"{host}:{port}"


def _setup_error(error: OSError, host: str, port: int) -> SetupError:
    if error.errno == errno.EADDRINUSE:
        fix = "Set agent.port to another one (0 takes any free port), or stop the process that holds it."
        return SetupError(f"port {port} on {host} is already in use", fix)
    if error.errno == errno.EADDRNOTAVAIL:
        fix = "Set agent.host to an address of this machine, such as 127.0.0.1."
        return SetupError(f"the address {host} does not belong to this machine", fix)
    if error.errno == errno.EACCES:
        return SetupError(f"port {port} on {host} may not be opened by this user", "Set agent.port to 1024 or above.")
    return SetupError(f"port {port} on {host} cannot be opened ({error.strerror})", "Set agent.port to another one.")
