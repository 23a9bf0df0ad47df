"""One connection of the control channel: moves bytes between a socket and its authenticated channel without blocking.

Invariant: ``send`` and ``close`` make no callbacks; callbacks come only from the event loop and from ``wake``, so a
caller may send while it iterates over its connections. ``on_close`` is called once, and never after ``close``.
"""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from closeranks.agent.event_loop import EventLoop
from closeranks.agent.transport.authenticated_channel import AuthenticatedChannel, Fields
from closeranks.agent.transport.channel_limits import ChannelLimits
from closeranks.agent.transport.framing import ChannelError
from closeranks.core.system.address import Address, plain_host

_UNAUTHENTICATED_CHUNK_BYTES = 512
_CHUNK_BYTES = 1 << 18
_RESET = (errno.ECONNRESET, errno.EPIPE)
_CLOSED = "closed the connection"


@dataclass(frozen=True, slots=True)
class ConnectionCallbacks:
    """Callbacks for what happens on a connection."""

    on_open: Callable[[ControlConnection], None]
    on_message: Callable[[ControlConnection, Fields], None]
    on_close: Callable[[ControlConnection, str], None]
    """With the reason, worded to follow the name of the other side; ``was_open`` tells whether it was ever
    authenticated."""


class ControlConnection:
    """One connection. Hashable by identity, so that callers can keep their own data about it in a dictionary."""

    def __init__(
        self,
        loop: EventLoop,
        endpoint: socket.socket,
        remote_address: Address,
        channel: AuthenticatedChannel,
        callbacks: ConnectionCallbacks,
        limits: ChannelLimits,
    ) -> None:
        self._loop = loop
        self._endpoint = endpoint
        self._fd = endpoint.fileno()
        self._channel = channel
        self._callbacks = callbacks
        self._limits = limits
        self._handshake_deadline = time.monotonic() + limits.handshake_s
        self._why = self._send_error = ""
        self._is_closed = False
        self.was_open = False
        self.is_other_job = False
        """Whether what it sent, or its reaction to our proof, shows that it does not belong to this job; silence shows
        nothing."""
        self.closed_by_remote = False
        """Whether the remote process, or its kernel, closed the connection; False after silence or our own close."""
        self.remote_address = remote_address
        """Address of the other side, as seen from this side."""
        self.local_host = plain_host(endpoint.getsockname()[0])
        """The address of this machine on that connection."""
        _tune(endpoint, limits.silence_s)
        loop.watch(self._fd, self._on_ready)
        self._flush()

    @property
    def is_open(self) -> bool:
        """Whether the other side holds the token and messages can be sent to it."""
        return self.was_open and not self._is_closed and not self._why

    @property
    def deadline(self) -> float | None:
        """When the handshake times out."""
        return None if self.was_open or self._is_closed else self._handshake_deadline

    def send(self, fields: Fields) -> bool:
        """Queue a message and write what the socket accepts now; False when the other side is unreachable."""
        if not self.is_open:
            return False
        self._channel.queue(fields)
        self._flush()
        if len(self._channel.outbox) > self._limits.max_queue_bytes:
            self._close_soon(f"does not read: {len(self._channel.outbox)} bytes are queued for it")
        return self.is_open

    def wake(self, now: float) -> None:
        """Close a connection that did not authenticate in time."""
        if self.deadline is not None and now >= self.deadline:
            self._end(f"did not show within {self._limits.handshake_s:g} s that it holds the token")

    def refuse(self, why: str) -> None:
        """Close the connection and report why."""
        if not self._is_closed:
            self._end(why)

    def close(self) -> None:
        """Close without a callback. What the socket has accepted is still delivered; the queue is dropped."""
        if not self._is_closed:
            self._is_closed = True
            self._loop.unwatch(self._fd)
            self._endpoint.close()
            self._channel.outbox.clear()

    def _close_soon(self, why: str) -> None:
        """Close in the event loop's next iteration: a socket that was shut down is ready at once."""
        self._why = self._why or why
        with suppress(OSError):
            self._endpoint.shutdown(socket.SHUT_RDWR)

    def _end(self, why: str) -> None:
        self.close()
        self._callbacks.on_close(self, why)

    def _on_ready(self) -> None:
        if self._is_closed:  # closed earlier in this iteration; its descriptor may be reused
            return
        if self._why:
            self._end(self._why)
            return
        self._flush()
        try:
            data = self._endpoint.recv(_CHUNK_BYTES if self._channel.is_open else _UNAUTHENTICATED_CHUNK_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self.closed_by_remote = error.errno in _RESET
            self._end(self._close_reason(_describe_error(error)))
            return
        if data:
            self._on_data(data)
        else:
            self.closed_by_remote = self._send_error in ("", _CLOSED)
            self._end(self._close_reason(self._send_error or _CLOSED))

    def _on_data(self, data: bytes) -> None:
        """Messages that arrived before an invalid one are delivered first."""
        try:
            for fields in self._channel.feed(data):
                self._report_open()
                if self.is_open:
                    self._callbacks.on_message(self, fields)
                if not self.is_open:
                    return
            self._report_open()
            self._flush()
        except ChannelError as error:
            self._flush()
            self.is_other_job = True
            self.refuse(error.what)

    def _report_open(self) -> None:
        if self._channel.is_open and not self.was_open:
            self.was_open = True
            self._flush()
            self._callbacks.on_open(self)

    def _flush(self) -> None:
        """Write what the socket accepts. An error is reported by the read that follows, after what had arrived before
        it has been delivered."""
        if self._is_closed:
            return
        outbox = self._channel.outbox
        try:
            while outbox:
                del outbox[: self._endpoint.send(outbox)]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            outbox.clear()
            self._send_error = _describe_error(error)
            with suppress(OSError):
                self._endpoint.shutdown(socket.SHUT_WR)
        self._loop.watch_writable(self._fd, bool(outbox))

    def _close_reason(self, reason: str) -> str:
        if self.was_open:
            return reason if self._channel.is_between_messages else f"{reason} in the middle of a message"
        if self._channel.has_sent_proof:
            self.is_other_job = True
            return f"{reason} when it was shown our token: it probably has another one"
        return f"{reason} before it had shown that it holds the token"


def _describe_error(error: OSError) -> str:
    if error.errno == errno.ETIMEDOUT:
        return "does not answer any more"
    if error.errno in _RESET:
        return _CLOSED
    return f"cannot be reached any more ({error.strerror})"


def _tune(endpoint: socket.socket, silence_s: float) -> None:
    """Send small messages at once (TCP_NODELAY), and let the kernel detect a host that lost its power or network."""
    endpoint.setblocking(False)
    probe_s = max(1, round(silence_s / 4))
    with suppress(OSError):  # the connection is gone already: the next read reports it
        endpoint.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (
            (socket.TCP_NODELAY, 1),
            (socket.TCP_KEEPIDLE, probe_s),
            (socket.TCP_KEEPINTVL, probe_s),
            (socket.TCP_KEEPCNT, 3),
            (socket.TCP_USER_TIMEOUT, max(1, round(silence_s * 1000))),
        ):
            endpoint.setsockopt(socket.IPPROTO_TCP, option, value)
