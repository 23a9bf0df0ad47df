"""Messages reach the incarnation of a host that they are meant for, and only a far end's end counts as one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest

from closeranks.agent.event_loop import EventLoop
from closeranks.agent.membership.messages import Envelope, HostNote, Join
from closeranks.agent.transport.client import ControlClient
from closeranks.agent.transport.host_connections import ASK_PLAN, HostConnections, JoinEndpoint
from tests.agent.transport.stage import TOKEN


@dataclass
class Hall:
    """The leader's connections and their clients, on one loop."""

    loop: EventLoop
    stack: ExitStack
    envelopes: list[Envelope] = field(default_factory=list)
    gone: list[tuple[str, int]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    clients: list[ControlClient] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.connections = self.stack.enter_context(
            HostConnections(
                self.loop,
                JoinEndpoint("127.0.0.1", 0, TOKEN),
                {"entry": "a:b"},
                own_name="h0",
                on_envelope=self.envelopes.append,
                on_disconnected=lambda name, incarnation: self.gone.append((name, incarnation)),
                on_note=self.notes.append,
            )
        )

    def client(self) -> tuple[ControlClient, list[Any]]:
        heard: list[Any] = []
        client = ControlClient(
            self.loop,
            str(self.connections.address),
            TOKEN,
            on_open=lambda connection: None,
            on_message=lambda connection, fields: heard.append(fields),
            on_close=lambda connection, why: heard.append(why),
            on_note=self.notes.append,
        )
        self.clients.append(self.stack.enter_context(client))
        self.until(lambda: client.is_open)
        return client, heard

    def until(self, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 30
        while not is_so():
            assert time.monotonic() < deadline
            self.connections.wake()
            for client in self.clients:
                client.wake()
            self.loop.run_once(time.monotonic() + 0.05)


@pytest.fixture
def hall() -> Iterator[Hall]:
    with EventLoop() as loop, ExitStack() as stack:
        yield Hall(loop, stack)


def join(name: str, incarnation: int) -> dict[str, Any]:
    return Envelope(0, name, incarnation, 1, Join(2)).to_fields()


def note(name: str, incarnation: int, text: str) -> Envelope:
    return Envelope(1, name, incarnation, 1, HostNote(text))


def test_who_asks_for_the_plan_is_told_it_and_who_leads(hall: Hall) -> None:
    client, heard = hall.client()
    client.send(ASK_PLAN)
    hall.until(lambda: bool(heard))
    assert heard == [{"kind": "plan", "lead": "h0", "plan": {"entry": "a:b"}}]


def test_two_agents_of_one_name_each_hear_what_is_meant_for_them(hall: Hall) -> None:
    (old, to_old), (new, to_new) = hall.client(), hall.client()
    old.send(join("h1", 1))
    hall.until(lambda: len(hall.envelopes) == 1)
    new.send(join("h1", 2))
    hall.until(lambda: len(hall.envelopes) == 2)
    hall.connections.send(note("h1", 1, "go"))
    hall.connections.send(note("h1", 2, "stay"))
    hall.until(lambda: bool(to_old and to_new))
    assert [fields["text"] for fields in (*to_old, *to_new)] == ["go", "stay"]


def test_a_host_that_hangs_up_is_gone_and_one_that_is_thrown_out_is_not(hall: Hall) -> None:
    (leaves, _), (odd, heard) = hall.client(), hall.client()
    leaves.send(join("h1", 1))
    odd.send(join("h2", 5))
    hall.until(lambda: len(hall.envelopes) == 2)
    leaves.close()
    hall.until(lambda: bool(hall.gone))
    odd.send({"kind": "no such letter"})
    hall.until(lambda: bool(heard))
    assert hall.gone == [("h1", 1)], "whether h2's workers live is for its lease to say"
    assert any("h2" in text and "invalid message" in text for text in hall.notes)


def test_the_lead_s_own_name_is_nobody_else_s(hall: Hall) -> None:
    client, heard = hall.client()
    client.send(join("h0", 1))
    hall.until(lambda: bool(heard))
    assert (hall.envelopes, hall.gone) == ([], [])
    assert any("--name" in text for text in hall.notes)


def test_seeing_off_answers_whoever_still_writes_and_waits_for_all_to_hang_up(hall: Hall) -> None:
    client, _ = hall.client()
    client.send(join("h1", 1))
    hall.until(lambda: bool(hall.envelopes))

    def answer(envelope: Envelope) -> list[Envelope]:
        client.close()
        return [note("h1", 1, "home")]

    client.send(join("h1", 1))
    hall.connections.close_gracefully([], answer, time.monotonic() + 30)
    assert (len(hall.envelopes), hall.notes) == (1, [])


def test_how_to_join_names_the_token_s_place() -> None:
    endpoint = JoinEndpoint("0.0.0.0", 0, TOKEN, address="10.0.0.1", token_file="/run/job.token")
    assert endpoint.join_command(29400, 4) == "closeranks agent --join 10.0.0.1:29400 -n 4 --token-file /run/job.token"
    assert "CLOSERANKS_TOKEN" in JoinEndpoint("fd00::1", 0, TOKEN).join_command(1, 4)
