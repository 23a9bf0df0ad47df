"""Servers, clients and a relay between them on one loop, and all that was heard of them."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from closeranks.agent.event_loop import EventLoop
from closeranks.agent.transport.authenticated_channel import Fields
from closeranks.agent.transport.channel_limits import ChannelLimits
from closeranks.agent.transport.client import ControlClient
from closeranks.agent.transport.connection import ControlConnection
from closeranks.agent.transport.server import ControlServer
from closeranks.agent.transport.token import JobToken

TOKEN = JobToken(b"5f" * 16 + b"0123456789abcdef" * 2)
OTHER_TOKEN = JobToken(b"6f" * 16 + b"0123456789abcdef" * 2)


@dataclass
class Heard:
    """What one side was told."""

    opened: list[ControlConnection] = field(default_factory=list)
    messages: list[tuple[ControlConnection, Fields]] = field(default_factory=list)
    closed: list[tuple[ControlConnection, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def fields(self) -> list[Fields]:
        return [fields for _, fields in self.messages]

    def callbacks(self) -> dict[str, Any]:
        return {
            "on_open": self.opened.append,
            "on_message": lambda connection, fields: self.messages.append((connection, fields)),
            "on_close": lambda connection, why: self.closed.append((connection, why)),
            "on_note": self.notes.append,
        }


class Stage:
    """One loop and what stands on it; ``until`` turns it."""

    def __init__(self) -> None:
        self.loop = EventLoop()
        self._standing: list[ControlServer | ControlClient | Relay] = []

    def server(self, token: JobToken = TOKEN, **settings: Any) -> tuple[ControlServer, Heard]:
        heard = Heard()
        server = ControlServer(self.loop, token=token, **{**heard.callbacks(), **settings})
        self._standing.append(server)
        return server, heard

    def client(self, address: object, token: JobToken = TOKEN, **settings: Any) -> tuple[ControlClient, Heard]:
        heard = Heard()
        client = ControlClient(self.loop, str(address), token, **{**heard.callbacks(), "seed": 1, **settings})
        self._standing.append(client)
        return client, heard

    def relay(self, upstream: ControlServer, **settings: Any) -> Relay:
        relay = Relay(self.loop, upstream.address, **settings)
        self._standing.append(relay)
        return relay

    def drop(self, thing: ControlServer | ControlClient | Relay) -> None:
        self._standing.remove(thing)
        thing.close()

    def turn(self, until: float) -> None:
        self.loop.run_once(min([until, *(at for thing in self._standing if (at := thing.deadline) is not None)]))
        for thing in list(self._standing):
            thing.wake()

    def until(self, is_done: Callable[[], object], within_s: float = 120.0) -> None:
        limit = time.monotonic() + within_s
        while not is_done():
            assert time.monotonic() < limit, "it did not come to pass in time"
            self.turn(limit)

    def settle(self, for_s: float = 0.05) -> None:
        """Let happen what may: for assertions that something does not."""
        limit = time.monotonic() + for_s
        while time.monotonic() < limit:
            self.turn(limit)

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for thing in self._standing:
            thing.close()
        self.loop.__exit__(kind, error, tb)


Alter = Callable[[bytes, int], bytes]
"""A piece of a stream and its place in it -> what is passed on."""


class Relay:
    """A man in the middle: passes on what each side sends, after ``alter``, and keeps what it saw."""

    deadline = None

    def __init__(self, loop: EventLoop, upstream: object, up: Alter | None = None, down: Alter | None = None) -> None:
        self._loop = loop
        self._upstream = upstream
        self.up = up or (lambda data, at: data)
        self.down = down or (lambda data, at: data)
        self.seen: list[tuple[bytearray, bytearray]] = []
        """Of each connection: what the client sent, what the server sent."""
        self._ends: list[tuple[socket.socket, socket.socket]] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = "{}:{}".format(*self._listener.getsockname())
        loop.watch(self._listener.fileno(), self._accept)

    def wake(self) -> None: ...

    def _accept(self) -> None:
        below, _ = self._listener.accept()
        above = socket.create_connection(self._upstream)  # type: ignore[arg-type]
        seen = (bytearray(), bytearray())
        self.seen.append(seen)
        self._ends.append((below, above))
        self._loop.watch(below.fileno(), lambda: self._pass(below, above, seen[0], lambda *piece: self.up(*piece)))
        self._loop.watch(above.fileno(), lambda: self._pass(above, below, seen[1], lambda *piece: self.down(*piece)))

    def _pass(self, source: socket.socket, target: socket.socket, seen: bytearray, alter: Alter) -> None:
        try:
            data = source.recv(1 << 16)
            if data:
                place = len(seen)
                seen += data
                target.sendall(alter(data, place))
                return
        except OSError:
            pass
        for end in (source, target):
            if end.fileno() >= 0:
                self._loop.unwatch(end.fileno())
                end.close()

    def inject(self, data: bytes, connection: int = -1, towards: str = "server") -> None:
        self._ends[connection][1 if towards == "server" else 0].sendall(data)

    def cut(self) -> None:
        for ends in self._ends:
            for end in ends:
                if end.fileno() >= 0:
                    self._loop.unwatch(end.fileno())
                    end.close()

    def close(self) -> None:
        self.cut()
        self._loop.unwatch(self._listener.fileno())
        self._listener.close()


def flipping(bit: int) -> Alter:
    """Flip one bit of a stream, wherever the kernel cuts it."""

    def alter(data: bytes, at: int) -> bytes:
        place = bit // 8 - at
        if not 0 <= place < len(data):
            return data
        changed = bytearray(data)
        changed[place] ^= 1 << bit % 8
        return bytes(changed)

    return alter


def is_closed_by_other(endpoint: socket.socket) -> bool:
    """Whether the other side closed the connection; what it said before is thrown away."""
    endpoint.setblocking(False)
    try:
        while endpoint.recv(4096):
            pass
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


@contextmanager
def caller(server: ControlServer) -> Iterator[socket.socket]:
    """A plain socket: one who speaks for itself."""
    with socket.create_connection(server.address) as endpoint:
        yield endpoint


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


FAST = ChannelLimits(handshake_s=0.3, connect_s=0.5, first_wait_s=0.01, longest_wait_s=0.05)
