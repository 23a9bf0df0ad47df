"""The leader's server: accepts connections that prove they hold the job's token, and refuses all others at little cost.

The caller runs the event loop until ``deadline`` at the latest and calls ``wake`` after each iteration. Invariant: an
error on one connection closes that connection; the others, and the event loop, continue.
"""

from __future__ import annotations

import errno
import socket
import time
from collections import Counter
from collections.abc import Callable
from types import TracebackType

from closeranks.agent.event_loop import EventLoop
from closeranks.agent.transport.authenticated_channel import AuthenticatedChannel, Fields
from closeranks.agent.transport.channel_limits import ChannelLimits
from closeranks.agent.transport.connection import ConnectionCallbacks, ControlConnection
from closeranks.agent.transport.refusal_log import RefusalLog
from closeranks.agent.transport.token import JobToken
from closeranks.core.system.address import Address, listen_on, plain_host

_ACCEPTS_PER_ITERATION = 32
_PAUSE_S = 1.0
"""How long no connection is accepted after the host ran out of descriptors or memory."""
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class ControlServer:
    """The leader's end of the control channel. All callbacks come from the event loop or from ``wake``."""

    def __init__(
        self,
        loop: EventLoop,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        token: JobToken,
        on_open: Callable[[ControlConnection], None],
        on_message: Callable[[ControlConnection, Fields], None],
        on_close: Callable[[ControlConnection, str], None],
        on_note: Callable[[str], None],
        limits: ChannelLimits | None = None,
    ) -> None:
        self._loop = loop
        self._token = token
        self._limits = limits or ChannelLimits()
        self._tell_open, self._tell_close, self._tell_note = on_open, on_close, on_note
        self._callbacks = ConnectionCallbacks(self._on_opened, on_message, self._on_ended)
        self._refusal_log = RefusalLog()
        self._unauthenticated: dict[ControlConnection, None] = {}
        """Unauthenticated connections in order of arrival, which is the order of their deadlines."""
        self._authenticated: dict[ControlConnection, None] = {}
        self._paused_until: float | None = None
        self._has_noted_pause = False
        self._listener = listen_on(host, port)
        self._fd = self._listener.fileno()
        self.address = Address(*self._listener.getsockname()[:2])
        """Where it listens."""
        loop.watch(self._fd, self._accept)

    @property
    def connections(self) -> tuple[ControlConnection, ...]:
        """The authenticated connections."""
        return tuple(self._authenticated)

    @property
    def deadline(self) -> float | None:
        """When ``wake`` must be called at the latest."""
        oldest = next(iter(self._unauthenticated), None)
        times = (self._paused_until, oldest.deadline if oldest else None)
        return min((at for at in times if at is not None), default=None)

    def wake(self) -> None:
        """Handle expired deadlines; cheap when there are none."""
        now = time.monotonic()
        for connection in list(self._unauthenticated):
            if connection.deadline is not None and connection.deadline > now:
                break
            connection.wake(now)
        if self._paused_until is not None and self._paused_until <= now and self._listener.fileno() >= 0:
            self._paused_until = None
            self._loop.watch(self._fd, self._accept)

    def close(self) -> None:
        """Close everything without callbacks; the port is free afterwards."""
        self._loop.unwatch(self._fd)
        self._listener.close()
        self._paused_until = None
        for connection in [*self._unauthenticated, *self._authenticated]:
            connection.close()
        self._unauthenticated.clear()
        self._authenticated.clear()

    def _accept(self) -> None:
        """Accept a bounded number, so that new connections cannot starve established ones."""
        for _ in range(_ACCEPTS_PER_ITERATION):
            try:
                endpoint, address = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno in _EXHAUSTED:
                    self._pause(error)
                    return
                continue  # that client is gone already
            self._admit(endpoint, Address(plain_host(address[0]), address[1]))

    def _pause(self, error: OSError) -> None:
        """Stop accepting for a while: a connection that cannot be accepted stays in the backlog and would keep the
        event loop spinning."""
        self._loop.unwatch(self._fd)
        self._paused_until = time.monotonic() + _PAUSE_S
        if not self._has_noted_pause:
            self._has_noted_pause = True
            self._tell_note(f"Hosts that want to join have to wait ({error.strerror}): raise the limit (ulimit -n).")

    def _admit(self, endpoint: socket.socket, remote_address: Address) -> None:
        """``remote_address``: as ``accept`` returned it; ``getpeername`` fails when the client is already gone."""
        channel = AuthenticatedChannel("server", self._token, max_bytes=self._limits.max_frame_bytes)
        self._unauthenticated[
            ControlConnection(self._loop, endpoint, remote_address, channel, self._callbacks, self._limits)
        ] = None
        if len(self._unauthenticated) > self._limits.max_unauthenticated:
            busiest = busiest_address([connection.remote_address.host for connection in self._unauthenticated])
            oldest = next(
                connection for connection in self._unauthenticated if connection.remote_address.host == busiest
            )
            oldest.refuse("has too many connections without a token")

    def _on_opened(self, connection: ControlConnection) -> None:
        del self._unauthenticated[connection]
        self._authenticated[connection] = None
        self._tell_open(connection)

    def _on_ended(self, connection: ControlConnection, why: str) -> None:
        if connection in self._authenticated:
            del self._authenticated[connection]
            self._tell_close(connection, why)
        elif connection in self._unauthenticated:
            del self._unauthenticated[connection]
            if line := self._refusal_log.line_for(connection.remote_address.host, why, time.monotonic()):
                self._tell_note(line)

    def __enter__(self) -> ControlServer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def busiest_address(hosts: list[str]) -> str:
    """The address with the most connections, the earliest in a tie: a client that floods the server is dropped before a
    host that joins."""
    return Counter(hosts).most_common(1)[0][0]
