"""A host's end on real sockets: it finds the lead, comes again, and says what is wrong."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from closeranks.agent.transport.channel_limits import ChannelLimits
from closeranks.agent.transport.client import ControlClient
from closeranks.agent.transport.connection import ControlConnection
from closeranks.agent.transport.framing import ChannelHello
from tests.agent.transport.stage import FAST, TOKEN, Stage


def free_port() -> int:
    """Nobody listens there; above the range that callers are given, or it might call itself."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def test_it_may_come_before_the_lead_and_says_so_once(stage: Stage) -> None:
    port = free_port()
    client, host = stage.client(f"127.0.0.1:{port}", limits=FAST)
    stage.settle(0.3)
    assert host.notes == [f"The leader at 127.0.0.1:{port} cannot be reached: nothing listens there; trying again."]
    assert host.notes[0] == f"{client.last_error}; trying again."
    assert client.num_refused == 0
    server, lead = stage.server(port=port)
    stage.until(lambda: host.opened and lead.opened)
    assert client.last_error == ""
    assert server.connections[0].is_open


def test_it_comes_again_when_it_is_cut_off(stage: Stage) -> None:
    server, lead = stage.server()
    relay = stage.relay(server)
    client, host = stage.client(relay.address, limits=FAST)
    for number in range(1, 4):
        stage.until(lambda number=number: len(host.opened) == number == len(lead.opened))
        client.send({"number": number})
        stage.until(lambda number=number: len(lead.messages) == number)
        relay.cut()
        stage.until(lambda number=number: len(host.closed) == number)
        assert not client.send({"lost": True})
    assert [why for _, why in host.closed] == ["closed the connection"] * 3
    assert len({id(connection) for connection in host.opened}) == 3


def test_names_are_looked_up_without_blocking(stage: Stage) -> None:
    server, lead = stage.server()
    client, host = stage.client(f"localhost:{server.address.port}")
    began = time.monotonic()
    client.wake()
    assert time.monotonic() - began < 10.0
    assert client._lookup is not None
    stage.until(lambda: host.opened and lead.opened)
    assert client._lookup is None


def test_a_name_that_is_not_known_is_told(stage: Stage) -> None:
    client, host = stage.client("no-such-host.invalid:29400", limits=FAST)
    stage.until(lambda: host.notes)
    assert "The leader at no-such-host.invalid:29400 cannot be reached: " in host.notes[0]
    assert "name" in host.notes[0]
    assert not client.is_open


def test_a_lookup_that_takes_too_long_is_killed(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("closeranks.agent.transport.dns_lookup._LOOKUP_CODE", "import signal; signal.pause()")
    client, host = stage.client("lead.invalid:29400", limits=FAST)
    client.wake()
    assert client._lookup is not None
    process = client._lookup._process
    stage.until(lambda: host.notes)
    assert "no name server answered within 0.5 s" in host.notes[0]
    assert process.returncode == -9
    client.close()


def test_closing_in_the_middle_leaves_nothing(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("closeranks.agent.transport.dns_lookup._LOOKUP_CODE", "import signal; signal.pause()")
    client, host = stage.client("lead.invalid:29400")
    client.wake()
    lookup = client._lookup
    assert lookup is not None
    stage.drop(client)
    assert lookup._process.returncode == -9
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        other, _ = stage.client("{}:{}".format(*listener.getsockname()))
        other.wake()
        stage.drop(other)
        assert other.deadline is None
    assert (host.notes, host.closed) == ([], [])


def test_one_that_accepts_and_says_nothing_is_given_up(stage: Stage) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client, host = stage.client("{}:{}".format(*listener.getsockname()), limits=FAST)
        stage.until(lambda: host.notes)
        assert "did not show within 0.3 s that it holds the token; trying again" in host.notes[0]
        stage.settle(0.7)
        assert client.num_refused == 0, "silence is no refusal: the lead may be stopped, and come back"


def test_one_whose_queue_is_full_does_not_answer(stage: Stage) -> None:
    """The kernel drops callers beyond the backlog: what a host behind a firewall looks like."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        fillers = []
        for _ in range(8):
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
            fillers.append(filler)
        client, host = stage.client("{}:{}".format(*listener.getsockname()), limits=FAST)
        stage.until(lambda: host.notes)
        assert "it did not answer within 0.5 s" in host.notes[0]
        for filler in fillers:
            filler.close()
        assert client.num_refused == 0


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "speaks HTTP"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "speaks SSH"),
        (b"\x15\x03\x03\x00\x02\x02\x46", "speaks TLS"),
        (ChannelHello("server", bytes(32), version=7).encode(), "speaks version 7 of the control channel, this side 2"),
        (ChannelHello("client", bytes(32)).encode(), "on the same side of the channel"),
        (ChannelHello("server", bytes(32)).encode() + bytes(52), "does not hold this job's token"),
    ],
)
def test_what_is_no_lead_is_named(stage: Stage, answer: bytes, words: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            endpoint, _ = listener.accept()
            endpoint.sendall(answer)
            endpoint.shutdown(socket.SHUT_WR)
            endpoint.close()

        stage.loop.watch(listener.fileno(), serve)
        client, host = stage.client("{}:{}".format(*listener.getsockname()), limits=FAST)
        stage.until(lambda: client.num_refused >= 3)
        stage.loop.unwatch(listener.fileno())
        assert len(host.notes) <= 2, "each trouble once, however often it comes"
        assert words in host.notes[0]
        assert words in client.last_error or "closed" in client.last_error
        assert host.opened == []


@given(st.binary(min_size=1, max_size=2000))
def test_whatever_answers_it_never_raises_and_never_opens(answer: bytes) -> None:
    with Stage() as stage, socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            endpoint, _ = listener.accept()
            with endpoint:
                endpoint.sendall(answer)
            calls.append(1)

        calls: list[int] = []

        stage.loop.watch(listener.fileno(), serve)
        _, host = stage.client("{}:{}".format(*listener.getsockname()), limits=FAST)
        stage.until(lambda: len(calls) >= 3)
        stage.loop.unwatch(listener.fileno())
        assert (host.opened, host.messages, host.closed) == ([], [], [])


def test_waits_follow_from_the_seed(stage: Stage) -> None:
    port = free_port()
    waits = []
    for seed in (3, 3, 4):
        started_at = time.monotonic()
        client, host = stage.client(f"127.0.0.1:{port}", seed=seed, limits=ChannelLimits(first_wait_s=1.0))
        stage.until(lambda host=host: host.notes)
        assert client.deadline is not None
        waits.append((client.deadline - time.monotonic(), client.deadline - started_at))  # it began to wait in between
        stage.drop(client)
    for (least, most), chance in zip(waits, (random.Random(seed).random() for seed in (3, 3, 4)), strict=True):
        assert least <= 1 - chance / 2 <= most


def test_a_lead_that_hangs_up_at_once_is_not_pestered(stage: Stage) -> None:
    def hang_up(connection: ControlConnection) -> None:
        opened.append(time.monotonic())
        connection.close()

    opened: list[float] = []
    server, _ = stage.server(on_open=hang_up)
    client, host = stage.client(server.address, limits=ChannelLimits(first_wait_s=0.02, longest_wait_s=0.5))
    stage.settle(1.5)
    assert len(opened) <= 9, "0.02 0.04 0.08 0.16 0.32 0.5 ... and half of that at the least"
    assert len(opened) >= 4
    assert len(host.closed) in (len(opened), len(opened) - 1)
    assert isinstance(client, ControlClient)


def test_the_secret_is_on_no_command_line(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("closeranks.agent.transport.dns_lookup._LOOKUP_CODE", "import signal; signal.pause()")
    client, _ = stage.client("lead.invalid:29400")
    client.wake()
    assert client._lookup is not None
    for pid in ("self", str(client._lookup._process.pid)):
        assert TOKEN.secret not in Path(f"/proc/{pid}/cmdline").read_bytes()


def test_the_room_needs_neither_torch_nor_threads() -> None:
    code = (
        "import sys, closeranks.agent.transport.server, closeranks.agent.transport.client;"
        "print(sorted({'torch', 'numpy', 'asyncio', 'ssl'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=dict(os.environ)
    )
    assert result.stdout.strip() == "[]"
