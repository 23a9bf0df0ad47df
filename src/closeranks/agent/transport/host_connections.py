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
from closeranks.agent.transport.address import Address
from closeranks.agent.transport.connection import ControlConnection
from closeranks.agent.transport.server import ControlServer
from closeranks.agent.transport.token import JobToken

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
        where = Address(self.address or self.host, port)
        shown = f" --token-file {self.token_file}" if self.token_file else ", with CLOSERANKS_TOKEN set"
        return f"closeranks agent --join {where} -n {num_workers}{shown}"


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
        door: JoinEndpoint,
        plan: Mapping[str, Any],
        *,
        own_name: str,
        on_letter: Callable[[Envelope], None],
        on_gone: Callable[[str, int], None],
        on_note: Callable[[str], None],
    ) -> None:
        self._loop = loop
        self._plan = dict(plan)
        self._own_name = own_name
        self._on_letter = on_letter
        self._on_gone = on_gone
        self._on_note = on_note
        self._lines: dict[tuple[str, int], ControlConnection] = {}
        """By name and incarnation: two agents of the same name are kept apart until the leader dismisses one."""
        self._names: dict[ControlConnection, tuple[str, int]] = {}
        self._server = ControlServer(
            loop,
            door.host,
            door.port,
            token=door.token,
            on_open=lambda peer: None,
            on_message=self._hear,
            on_close=self._closed,
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

    def send(self, letter: Envelope) -> None:
        """Send a message. A host that is not connected is sent it again after its next heartbeat, or is lost."""
        line = self._lines.get((letter.host, letter.incarnation))
        if line is not None:
            line.send(letter.to_fields())

    def _hear(self, peer: ControlConnection, fields: Any) -> None:
        if fields == ASK_PLAN:
            peer.send({"kind": PLAN, "lead": self._own_name, "plan": self._plan})
            return
        try:
            letter = Envelope.from_fields(fields)
        except ProtocolError as error:
            peer.refuse(f"sent an invalid message: {error}")
            return
        if letter.host == self._own_name:
            peer.refuse(f"calls itself {letter.host}, which is this host's name: start it with another --name")
            return
        who = (letter.host, letter.incarnation)
        self._lines[who], self._names[peer] = peer, who
        self._on_letter(letter)

    def _closed(self, peer: ControlConnection, why: str) -> None:
        who = self._names.pop(peer, None)
        if who is not None and self._lines.get(who) is peer:
            del self._lines[who]
            if peer.has_hung_up:
                self._on_gone(*who)
        if not peer.has_hung_up or (who is not None and not self._is_closing):
            self._on_note(f"{who[0] if who else 'A host'} at {peer.remote_address} {why}.")

    def close_gracefully(
        self, letters: Iterable[Envelope], answer: Callable[[Envelope], list[Envelope]], deadline: float
    ) -> None:
        """Send these messages, answer those that arrive meanwhile, and close when all hosts have disconnected, or at
        ``deadline``."""

        def reply(letter: Envelope) -> None:
            for one in answer(letter):
                self.send(one)

        self._is_closing, self._on_letter = True, reply
        for letter in letters:
            self.send(letter)
        while self._server.connections and time.monotonic() < deadline:
            self._loop.run_once(deadline)
        self.close()

    def close(self) -> None:
        self._server.close()

    def __enter__(self) -> HostConnections:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
