"""How do other hosts come in? A connection that shows the token is told the plan, and then letters pass.

Invariants: a host is reached by the connection over which that life of it last wrote; a message that is no letter ends
that connection and disturbs nobody else; nobody comes in under the name of the lead's own host; only a connection that
the far end has ended counts as a host that is gone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from closeranks.agent.control.address import Address
from closeranks.agent.control.peer import Peer
from closeranks.agent.control.server import ControlServer
from closeranks.agent.control.token import Token
from closeranks.agent.loop import Loop
from closeranks.agent.membership.checks import ProtocolError
from closeranks.agent.membership.messages import Letter

ASK_PLAN = {"kind": "plan?"}
PLAN = "plan"


@dataclass(frozen=True, slots=True)
class Door:
    """Where the lead listens for other hosts."""

    host: str
    port: int
    token: Token
    address: str = ""
    """Under which other hosts find this one; empty: the one it listens on."""
    token_file: str = ""
    """Where the token lies, if it was not given by the shell."""

    def how_to_join(self, port: int, num_workers: int) -> str:
        """The command for another host."""
        where = Address(self.address or self.host, port)
        shown = f" --token-file {self.token_file}" if self.token_file else ", with CLOSERANKS_TOKEN set"
        return f"closeranks agent --join {where} -n {num_workers}{shown}"


@dataclass(frozen=True, slots=True)
class Gone:
    """That life of a host has hung up."""

    name: str
    incarnation: int


class Gate:
    """The lead's side of all connections. All callbacks come from the loop's turn or from ``wake``."""

    def __init__(
        self,
        loop: Loop,
        door: Door,
        plan: Mapping[str, Any],
        *,
        own_name: str,
        on_letter: Callable[[Letter], None],
        on_gone: Callable[[str, int], None],
        on_note: Callable[[str], None],
    ) -> None:
        self._loop = loop
        self._plan = dict(plan)
        self._own_name = own_name
        self._on_letter = on_letter
        self._on_gone = on_gone
        self._on_note = on_note
        self._lines: dict[tuple[str, int], Peer] = {}
        """By name and incarnation: two agents of one name are two, until the machine has sent one of them home."""
        self._names: dict[Peer, tuple[str, int]] = {}
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
        """Whether hosts are on their way home: that they hang up is no news then."""

    @property
    def deadline(self) -> float | None:
        return self._server.deadline

    def wake(self) -> None:
        self._server.wake()

    def send(self, letter: Letter) -> None:
        """A host that is not connected hears it again when it beats, or is counted as lost."""
        line = self._lines.get((letter.host, letter.incarnation))
        if line is not None:
            line.send(letter.to_fields())

    def _hear(self, peer: Peer, fields: Any) -> None:
        if fields == ASK_PLAN:
            peer.send({"kind": PLAN, "lead": self._own_name, "plan": self._plan})
            return
        try:
            letter = Letter.from_fields(fields)
        except ProtocolError as error:
            peer.refuse(f"sent what is no letter: {error}")
            return
        if letter.host == self._own_name:
            peer.refuse(f"calls itself {letter.host}, as this host does: start it with another --name")
            return
        who = (letter.host, letter.incarnation)
        self._lines[who], self._names[peer] = peer, who
        self._on_letter(letter)

    def _closed(self, peer: Peer, why: str) -> None:
        who = self._names.pop(peer, None)
        if who is not None and self._lines.get(who) is peer:
            del self._lines[who]
            if peer.has_hung_up:
                self._on_gone(*who)
        if not peer.has_hung_up or (who is not None and not self._is_closing):
            self._on_note(f"{who[0] if who else 'A host'} at {peer.where} {why}.")

    def see_off(self, letters: Iterable[Letter], answer: Callable[[Letter], list[Letter]], deadline: float) -> None:
        """Send these, answer who writes meanwhile, and close when all have hung up, or then."""

        def reply(letter: Letter) -> None:
            for one in answer(letter):
                self.send(one)

        self._is_closing, self._on_letter = True, reply
        for letter in letters:
            self.send(letter)
        while self._server.peers and time.monotonic() < deadline:
            self._loop.turn(deadline)
        self.close()

    def close(self) -> None:
        self._server.close()

    def __enter__(self) -> Gate:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
