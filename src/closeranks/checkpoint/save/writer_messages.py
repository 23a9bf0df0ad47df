"""Messages between a trainer and its writer process over a socket pair.

Four bytes of length, then JSON; a message may carry one file descriptor. Invariant: a message arrives complete, or the
other side is gone (``EOFError``). Imports no torch.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class WriterMessage:
    body: Mapping[str, Any]
    fd: int | None
    """The receiver must close it."""


def send(connection: socket.socket, body: Mapping[str, Any], fd: int | None = None) -> None:
    data = json.dumps(body, separators=(",", ":")).encode()
    head = len(data).to_bytes(4, "little")
    if fd is None:
        connection.sendall(head + data)
        return
    sent = socket.send_fds(connection, [head], [fd])  # it travels with the first byte
    connection.sendall(head[sent:] + data)


def receive(connection: socket.socket) -> WriterMessage:
    head, fds, _, _ = socket.recv_fds(connection, 4, 1)
    fd = fds[0] if fds else None
    try:
        head += _exactly(connection, 4 - len(head)) if head else b""
        if not head:
            raise EOFError("the other side closed the connection")
        return WriterMessage(json.loads(_exactly(connection, int.from_bytes(head, "little"))), fd)
    except BaseException:
        if fd is not None:
            os.close(fd)
        raise


def _exactly(connection: socket.socket, num_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < num_bytes:
        piece = connection.recv(min(num_bytes - len(data), 1 << 20))
        if not piece:
            raise EOFError("the other side closed the connection")
        data += piece
    return bytes(data)
