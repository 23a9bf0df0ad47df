"""The protocol between the agent and a worker: JSON lines over a stream socket.

Invariant: a message arrives complete or not at all, however the kernel splits the stream; the agent's side never
blocks.
"""

from __future__ import annotations

import json
import socket
from typing import Any, NamedTuple

Message = dict[str, Any]

_CHUNK_BYTES = 1 << 18


class WorkerFds(NamedTuple):
    """The descriptors that a worker starts with, in the order in which they are sent."""

    link: int
    progress: int
    output: int


def encode_message(message: Message) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


class LineBuffer:
    """Bytes in, complete messages out; an incomplete line is buffered."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def feed(self, data: bytes) -> list[Message]:
        """Pieces of an unfinished line are joined once, at its end: a long line costs no more than its length."""
        if b"\n" not in data:
            self._pieces.append(data)
            return []
        *lines, rest = b"".join((*self._pieces, data)).split(b"\n")
        self._pieces = [rest]
        return [json.loads(line) for line in lines]


class WorkerChannel:
    """The agent's end of one worker's link. Outgoing messages that do not fit the socket wait in ``outbox``."""

    def __init__(self, endpoint: socket.socket) -> None:
        endpoint.setblocking(False)
        self.endpoint = endpoint
        self.outbox = bytearray()
        self.is_open = True
        self._lines = LineBuffer()

    def send(self, message: Message) -> None:
        self.outbox += encode_message(message)
        self.flush()

    def flush(self) -> None:
        """Write what the socket accepts now. If the worker is gone the rest is dropped: its death is reported
        elsewhere."""
        try:
            while self.outbox:
                del self.outbox[: self.endpoint.send(self.outbox)]
        except BlockingIOError:
            return
        except OSError:
            self.outbox.clear()

    def receive(self) -> list[Message] | None:
        """Complete messages that have arrived; None when nothing has.

        One bounded read, so that a chatty worker cannot starve the others. ``is_open`` tells whether more may come.
        """
        try:
            data = self.endpoint.recv(_CHUNK_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        self.is_open = bool(data)
        return self._lines.feed(data)

    def close(self) -> None:
        self.endpoint.close()
