"""The leader's connections to the agents of other hosts: sends them the plan, then carries membership messages.

Invariants: a host is reached by the connection over which its current incarnation last sent a message; an invalid
message closes that connection and affects no other; no host can join under the name of the leader's own host; only a
connection that the remote end closed counts as a disconnected host.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from closeranks.agent.event_loop import EventLoop
from closeranks.agent.membership.field_codecs import ProtocolError
from closeranks.agent.membership.messages import Envelope
from closeranks.agent.transport.connection import ControlConnection
from closeranks.agent.transport.server import ControlServer
from closeranks.agent.transport.token import JobToken
from closeranks.core.system.address import Address

ASK_PLAN = {"kind": "plan?"}
PLAN = "plan"


@dataclass(frozen=True, slots=True)
class JoinEndpoint:
    """Where the leader listens for other hosts."""

    host: str
    port: int
    token: JobToken
    address: str = ""
    """The address that other hosts connect to; empty: the one it listens on."""
    token_file: str = ""
    """The file with the token, if it was not given by the environment."""

    def join_command(self, port: int, num_workers: int) -> str:
        """The command that joins another host."""
        address = Address(self.address or self.host, port)
        token_option = f" --token-file {self.token_file}" if self.token_file else ", with CLOSERANKS_TOKEN set"
        return f"closeranks agent --join {address} -n {num_workers}{token_option}"


@dataclass(frozen=True, slots=True)
class HostDisconnected:
    """That incarnation of a host has closed its connection."""

    name: str
    incarnation: int


class HostConnections:
    """The leader's side of all connections. All callbacks come from the event loop or from ``wake``."""

    def __init__(
        self,
        loop: EventLoop,
        endpoint: JoinEndpoint,
        plan: Mapping[str, Any],
        *,
        own_name: str,
        on_envelope: Callable[[Envelope], None],
        on_disconnected: Callable[[str, int], None],
        on_note: Callable[[str], None],
    ) -> None:
        self._loop = loop
        self._plan = dict(plan)
        self._own_name = own_name
        self._on_envelope = on_envelope
        self._on_disconnected = on_disconnected
        self._on_note = on_note
        self._connections: dict[tuple[str, int], ControlConnection] = {}
        """By name and incarnation: two agents of the same name are kept apart until the leader dismisses one."""
        self._names: dict[ControlConnection, tuple[str, int]] = {}
        self._server = ControlServer(
            loop,
            endpoint.host,
            endpoint.port,
            token=endpoint.token,
            on_open=lambda connection: None,
            on_message=self._receive,
            on_close=self._on_close,
            on_note=on_note,
        )
        self.address = self._server.address
        self._is_closing = False
        """Whether hosts have been dismissed: that they disconnect is expected then, and not reported."""

    @property
    def deadline(self) -> float | None:
        return self._server.deadline

    def wake(self) -> None:
        self._server.wake()

    def send(self, envelope: Envelope) -> None:
        """Send a message. A host that is not connected is sent it again after its next heartbeat, or is lost."""
        connection = self._connections.get((envelope.host, envelope.incarnation))
        if connection is not None:
            connection.send(envelope.to_fields())

    def _receive(self, connection: ControlConnection, fields: Any) -> None:
        if fields == ASK_PLAN:
            connection.send({"kind": PLAN, "lead": self._own_name, "plan": self._plan})
            return
        try:
            envelope = Envelope.from_fields(fields)
        except ProtocolError as error:
            connection.refuse(f"sent an invalid message: {error}")
            return
        if envelope.host == self._own_name:
            connection.refuse(f"calls itself {envelope.host}, which is this host's name: start it with another --name")
            return
        identity = (envelope.host, envelope.incarnation)
        self._connections[identity], self._names[connection] = connection, identity
        self._on_envelope(envelope)

    def _on_close(self, connection: ControlConnection, why: str) -> None:
        identity = self._names.pop(connection, None)
        if identity is not None and self._connections.get(identity) is connection:
            del self._connections[identity]
            if connection.closed_by_remote:
                self._on_disconnected(*identity)
        if not connection.closed_by_remote or (identity is not None and not self._is_closing):
            self._on_note(f"{identity[0] if identity else 'A host'} at {connection.remote_address} {why}.")

    def close_gracefully(
        self, envelopes: Iterable[Envelope], answer: Callable[[Envelope], list[Envelope]], deadline: float
    ) -> None:
        """Send these messages, answer those that arrive meanwhile, and close when all hosts have disconnected, or at
        ``deadline``."""

        def reply(envelope: Envelope) -> None:
            for one in answer(envelope):
                self.send(one)

        self._is_closing, self._on_envelope = True, reply
        for envelope in envelopes:
            self.send(envelope)
        while self._server.connections and time.monotonic() < deadline:
            self._loop.run_once(deadline)
        self.close()

    def close(self) -> None:
        self._server.close()

    def __enter__(self) -> HostConnections:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
