"""A host's connection to the leader: connects, proves that it holds the token, and reconnects when it is cut off.

The caller runs the event loop until ``deadline`` at the latest and calls ``wake`` after each iteration; the first
``wake`` starts the first attempt. A client never gives up by itself: ``num_refused`` and ``last_error`` tell the caller
when it should. Invariant: at most one of a DNS lookup, a connection attempt and a connection exists at any time.
"""

from __future__ import annotations

import errno
import os
import random
import socket
import time
from collections.abc import Callable
from types import TracebackType

from closeranks.agent.event_loop import EventLoop
from closeranks.agent.transport.authenticated_channel import AuthenticatedChannel, Fields
from closeranks.agent.transport.channel_limits import ChannelLimits
from closeranks.agent.transport.connection import ConnectionCallbacks, ControlConnection
from closeranks.agent.transport.dns_lookup import DnsLookup, SocketAddress, numeric_addresses
from closeranks.agent.transport.token import JobToken
from closeranks.core.system.address import Address, parse_address


class Backoff:
    """Each wait is drawn between half of a bound and the whole of it; the bound doubles until ``longest_s``."""

    def __init__(self, first_s: float, longest_s: float, seed: int | None = None) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._bound_s = first_s
        self._random = random.Random(seed)

    def next_s(self) -> float:
        bound = self._bound_s
        self._bound_s = min(2 * bound, self._longest_s)
        return bound * (1 - self._random.random() / 2)

    def reset(self) -> None:
        self._bound_s = self._first_s


_MAX_NOTES = 16


class ControlClient:
    """A host's end of the control channel. All callbacks come from the event loop or from ``wake``."""

    def __init__(
        self,
        loop: EventLoop,
        address: str | Address,
        token: JobToken,
        *,
        on_open: Callable[[ControlConnection], None],
        on_message: Callable[[ControlConnection, Fields], None],
        on_close: Callable[[ControlConnection, str], None],
        on_note: Callable[[str], None],
        limits: ChannelLimits | None = None,
        seed: int | None = None,
    ) -> None:
        self._loop = loop
        self._token = token
        self._limits = limits or ChannelLimits()
        self._tell_open, self._tell_close, self._tell_note = on_open, on_close, on_note
        self._callbacks = ConnectionCallbacks(self._on_opened, on_message, self._on_ended)
        self.address = parse_address(address) if isinstance(address, str) else address
        self._backoff = Backoff(self._limits.first_wait_s, self._limits.longest_wait_s, seed)
        self._addresses: list[SocketAddress] = []
        """Addresses of this round that have not been tried yet."""
        self._lookup: DnsLookup | None = None
        self._connecting: socket.socket | None = None
        self._trying = self.address
        self._connection: ControlConnection | None = None
        self._opened_at = 0.0
        self._until: float | None = time.monotonic()
        """When the next attempt begins, or when the lookup or the connection attempt under way times out."""
        self._noted: list[str] = []
        self._is_closed = False
        self.last_error = ""
        """Why there is no connection, as a sentence without a full stop; empty while there is one."""
        self.refused_since: float | None = None
        """Since when the leader's machine refuses connections (nothing listens there); None while there is a
        connection, or no answer at all."""
        self.num_refused = 0
        """Consecutive attempts that reached a process which showed that it does not belong to this job; one that only
        stays silent, such as a leader that is stopped, is not counted."""

    @property
    def is_open(self) -> bool:
        return self._connection is not None and self._connection.is_open

    @property
    def connection(self) -> ControlConnection | None:
        """The connection to the leader, while it is open."""
        return self._connection if self.is_open else None

    @property
    def deadline(self) -> float | None:
        """When ``wake`` must be called at the latest."""
        return self._connection.deadline if self._connection is not None else self._until

    def send(self, fields: Fields) -> bool:
        """Queue a message; False when there is no connection (the message is not kept for the next one)."""
        return self._connection is not None and self._connection.send(fields)

    def wake(self) -> None:
        """Handle expired deadlines; cheap when there are none."""
        now = time.monotonic()
        if self._connection is not None:
            self._connection.wake(now)
        elif self._until is not None and now >= self._until and not self._is_closed:
            if self._lookup is not None:
                self._fail(f"no name server answered within {self._limits.connect_s:g} s")
            elif self._connecting is not None:
                self._drop_connecting()
                self._try_next(f"it did not answer within {self._limits.connect_s:g} s")
            else:
                self._begin_round()

    def close(self) -> None:
        """Close without calling ``on_close``."""
        self._is_closed = True
        self._until = None
        self._drop_lookup()
        self._drop_connecting()
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    # --- connecting to the leader

    def _begin_round(self) -> None:
        if addresses := numeric_addresses(self.address.host, self.address.port):
            self._addresses = addresses
            self._try_next("")
            return
        self._until = time.monotonic() + self._limits.connect_s
        try:
            self._lookup = DnsLookup(self._loop, self.address.host, self.address.port, self._on_found)
        except OSError as error:
            self._fail(f"its name cannot be looked up ({error.strerror})")

    def _on_found(self, addresses: list[SocketAddress], why: str) -> None:
        self._lookup = None
        if not addresses:
            self._fail(f"its name does not resolve ({why})")
            return
        self._addresses = addresses
        self._try_next("")

    def _try_next(self, why: str) -> None:
        """Try the next address of this round; after the last, report ``why`` and begin a wait."""
        while self._addresses:
            target = self._addresses.pop(0)
            number = self._connect(target)
            if number == errno.EINPROGRESS:
                return
            why = _unreachable(number)
        self._fail(why)

    def _connect(self, target: SocketAddress) -> int:
        try:
            endpoint = socket.socket(target.family, socket.SOCK_STREAM)
        except OSError as error:
            return error.errno or errno.EAFNOSUPPORT
        endpoint.setblocking(False)
        number = endpoint.connect_ex(target.address)
        if number not in (0, errno.EINPROGRESS):
            endpoint.close()
            return number
        self._connecting, self._trying = endpoint, Address(*target.address[:2])
        self._until = time.monotonic() + self._limits.connect_s
        self._loop.watch(endpoint.fileno(), self._on_connected)
        self._loop.watch_writable(endpoint.fileno(), True)
        return errno.EINPROGRESS

    def _on_connected(self) -> None:
        endpoint = self._connecting
        if endpoint is None:
            return
        number = endpoint.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) or _self_connect_error(endpoint)
        if number:
            self._drop_connecting()
            self._try_next(_unreachable(number))
            return
        self._loop.unwatch(endpoint.fileno())
        self._connecting, self._until = None, None
        channel = AuthenticatedChannel("client", self._token, max_bytes=self._limits.max_frame_bytes)
        self._connection = ControlConnection(self._loop, endpoint, self._trying, channel, self._callbacks, self._limits)

    def _fail(self, why: str) -> None:
        self._drop_lookup()
        is_deserted = why == _unreachable(errno.ECONNREFUSED)
        self.refused_since = (self.refused_since or time.monotonic()) if is_deserted else None
        self._wait(f"The leader at {self.address} cannot be reached: {why}")

    # --- connected

    def _on_opened(self, connection: ControlConnection) -> None:
        self._opened_at = time.monotonic()
        self.refused_since = None
        self.last_error, self.num_refused = "", 0
        self._noted.clear()
        self._tell_open(connection)

    def _on_ended(self, connection: ControlConnection, why: str) -> None:
        """Only a connection that lasted resets the backoff, so that a leader which hangs up at once is not flooded."""
        self._connection = None
        self._addresses = []
        if connection.was_open:
            if time.monotonic() - self._opened_at > self._limits.longest_wait_s:
                self._backoff.reset()
            self.last_error = f"The leader at {self.address} {why}"
            self._until = time.monotonic() + self._backoff.next_s()
            self._tell_close(connection, why)
        else:
            self.num_refused += connection.is_other_job
            self._wait(f"The process listening at {self.address} {why}")

    def _wait(self, trouble: str) -> None:
        """Each reason is reported once until there has been a connection again."""
        self.last_error = trouble
        self._until = time.monotonic() + self._backoff.next_s()
        if trouble not in self._noted and len(self._noted) < _MAX_NOTES:
            self._noted.append(trouble)
            self._tell_note(f"{trouble}; trying again.")

    def _drop_lookup(self) -> None:
        if self._lookup is not None:
            self._lookup.close()
            self._lookup = None

    def _drop_connecting(self) -> None:
        if self._connecting is not None:
            self._loop.unwatch(self._connecting.fileno())
            self._connecting.close()
            self._connecting = None

    def __enter__(self) -> ControlClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _self_connect_error(endpoint: socket.socket) -> int:
    """TCP self-connect: on one host, a client of a port that nobody listens on may be given that port as its own source
    port, and so connect to itself."""
    try:
        return errno.ECONNREFUSED if endpoint.getsockname() == endpoint.getpeername() else 0
    except OSError as error:
        return error.errno or errno.ENOTCONN


def _unreachable(number: int) -> str:
    if number == errno.ECONNREFUSED:
        return "nothing listens there"
    return os.strerror(number).lower()
