"""The lead's end on real sockets: whoever calls, those who are in go on."""

from __future__ import annotations

import os
import random
import resource
import socket
import struct
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from closeranks.agent.transport.channel_limits import ChannelLimits
from closeranks.agent.transport.connection import ControlConnection
from closeranks.agent.transport.server import ControlServer
from tests.agent.traces import is_listening
from tests.agent.transport.stage import (
    FAST,
    OTHER_TOKEN,
    Heard,
    Stage,
    caller,
    flipping,
    is_closed_by_other,
    resident_bytes,
)


def joined(stage: Stage, **settings: object) -> tuple[ControlServer, Heard, object, Heard]:
    server, lead = stage.server(**settings)
    client, host = stage.client(server.address)
    stage.until(lambda: lead.opened and host.opened)
    return server, lead, client, host


def test_messages_go_both_ways_and_loopback_is_where_it_listens(stage: Stage) -> None:
    server, lead = stage.server()
    client, host = stage.client(server.address)
    assert server.address.host == "127.0.0.1"
    stage.until(lambda: lead.opened and host.opened)
    connection = lead.opened[0]
    assert (connection.remote_address.host, connection.local_host, host.opened[0].remote_address) == (
        "127.0.0.1",
        "127.0.0.1",
        server.address,
    )
    assert client.send({"type": "join", "text": "grüß"})
    assert connection.send({"type": "welcome"})
    stage.until(lambda: lead.messages and host.messages)
    assert lead.messages == [(connection, {"type": "join", "text": "grüß"})]
    assert host.fields == [{"type": "welcome"}]
    assert server.connections == (connection,)
    assert (lead.notes, host.notes) == ([], [])


def test_a_large_message_does_not_block_and_arrives(stage: Stage) -> None:
    _, lead, client, _ = joined(stage)
    text = "x" * ((16 << 20) - 11)
    assert client.send({"text": text})  # type: ignore[attr-defined]
    assert len(client.connection._channel.outbox) > 1 << 20, "sixteen megabytes do not fit a socket's buffer"  # type: ignore[attr-defined]
    stage.until(lambda: lead.messages)
    assert lead.fields == [{"text": text}]


def test_who_leaves_is_told_of_and_the_port_is_free_at_the_end(stage: Stage) -> None:
    server, lead, client, _ = joined(stage)
    stage.drop(client)  # type: ignore[arg-type]
    stage.until(lambda: lead.closed)
    assert lead.closed == [(lead.opened[0], "closed the connection")]
    assert server.connections == ()
    assert not lead.opened[0].send({"type": "late"})
    stage.drop(server)
    assert not is_listening(server.address.port)


def test_closing_tells_nobody_here(stage: Stage) -> None:
    _, lead, client, host = joined(stage)
    lead.opened[0].close()
    stage.until(lambda: host.closed)
    assert lead.closed == []
    assert not lead.opened[0].is_open
    stage.until(lambda: len(lead.opened) == 2 == len(host.opened))
    assert client.is_open  # type: ignore[attr-defined]


FOREIGN = [
    (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "speaks HTTP"),
    (b"\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\x03\x03" + bytes(200), "speaks TLS"),
    (bytes(range(255, 0, -1)), "does not speak"),
]


@pytest.mark.parametrize(("data", "words"), FOREIGN)
def test_foreign_callers_are_refused_with_one_sentence(stage: Stage, data: bytes, words: str) -> None:
    server, lead, client, host = joined(stage)
    for _ in range(5):
        with caller(server) as stranger:
            stranger.sendall(data)
            stage.until(lambda stranger=stranger: is_closed_by_other(stranger))
    assert len(lead.notes) == 1
    assert lead.notes[0].startswith("127.0.0.1 ")
    assert words in lead.notes[0]
    assert "it was refused" in lead.notes[0]
    assert client.send({"type": "beat"})  # type: ignore[attr-defined]
    stage.until(lambda: lead.messages)
    assert (lead.closed, host.closed, len(server._unauthenticated)) == ([], [], 0)


def test_random_bytes_of_any_length_disturb_nobody(stage: Stage) -> None:
    server, lead, client, host = joined(stage)
    chance = random.Random(7)
    for number in range(200):
        with caller(server) as stranger:
            stranger.sendall(chance.randbytes(chance.randrange(1, 3000)))
            if number % 3 == 0:  # a reset instead of an end
                stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            if number % 2:
                stage.turn(time.monotonic())
        assert client.send({"number": number})  # type: ignore[attr-defined]
        stage.turn(time.monotonic())
    stage.until(lambda: len(lead.messages) == 200 and not server._unauthenticated)
    assert [fields["number"] for fields in lead.fields] == list(range(200))
    assert (lead.closed, host.closed) == ([], [])
    assert len(lead.notes) == 1


@pytest.fixture(scope="module")
def recorded() -> tuple[bytes, bytes]:
    """What both sides of a real conversation sent, as a relay saw it."""
    with Stage() as stage:
        server, lead = stage.server()
        relay = stage.relay(server)
        client, host = stage.client(relay.address)
        stage.until(lambda: lead.opened and host.opened)
        client.send({"type": "join", "host": "h1"})
        lead.opened[0].send({"type": "welcome", "rank": 1})
        stage.until(lambda: lead.messages and host.messages)
        return bytes(relay.seen[0][0]), bytes(relay.seen[0][1])


@given(st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_record_played_again_whole_cut_or_altered_is_refused(
    recorded: tuple[bytes, bytes], data: st.DataObject
) -> None:
    stream = bytearray(recorded[0][: data.draw(st.integers(1, len(recorded[0])))])
    for _ in range(data.draw(st.integers(0, 3))):
        stream[data.draw(st.integers(0, len(stream) - 1))] = data.draw(st.integers(0, 255))
    with Stage() as stage:
        server, lead = stage.server(limits=FAST)
        with caller(server) as stranger:
            stranger.sendall(stream)
            stranger.shutdown(socket.SHUT_WR)
            stage.until(lambda: is_closed_by_other(stranger))
        assert (lead.opened, lead.messages, lead.closed) == ([], [], [])
        assert len(lead.notes) == 1


@pytest.mark.parametrize("towards", ["server", "client"])
def test_each_flipped_byte_on_the_way_is_refused(recorded: tuple[bytes, bytes], towards: str) -> None:
    """A real client, a real server, and a relay that flips one bit (the pure sweep flips all of them)."""
    total = len(recorded[0 if towards == "server" else 1])
    way = "up" if towards == "server" else "down"
    for byte in range(total):
        with Stage() as stage:
            server, lead = stage.server(on_open=lambda connection: connection.send({"type": "welcome", "rank": 1}))
            relay = stage.relay(server, **{way: flipping(8 * byte + byte % 8)})
            _, host = stage.client(
                relay.address, on_open=lambda connection: connection.send({"type": "join", "host": "h1"})
            )
            heard = lead if towards == "server" else host
            stage.until(lambda heard=heard: heard.closed or heard.notes)
            assert heard.messages == [], f"byte {byte}"


def test_a_frame_sent_twice_on_the_way_is_refused(stage: Stage) -> None:
    server, lead = stage.server()
    relay = stage.relay(server)
    client, host = stage.client(relay.address)
    stage.until(lambda: lead.opened and host.opened)
    before = len(relay.seen[0][0])
    client.send({"type": "evict", "host": "h2"})
    stage.until(lambda: lead.messages)
    relay.inject(bytes(relay.seen[0][0][before:]))
    stage.until(lambda: lead.closed)
    assert lead.closed[0][1] == "sent a message that was altered, replayed or reordered in transit"
    assert lead.fields == [{"type": "evict", "host": "h2"}]


def test_whole_frames_of_another_connection_are_refused_in_both_directions(stage: Stage) -> None:
    """Both clients hold the token; the man in the middle passes on what one says as if the other had."""
    server, lead = stage.server()
    relay = stage.relay(server)
    clients = [stage.client(relay.address) for _ in range(2)]
    stage.until(lambda: len(lead.opened) == 2 and all(heard.opened for _, heard in clients))
    which = {
        connection: at
        for at, (up, _) in enumerate(relay.seen)
        for connection in lead.opened
        if at == lead.opened.index(connection)
    }
    assert sorted(which.values()) == [0, 1]
    before = [(len(up), len(down)) for up, down in relay.seen]
    first = clients[0][0]
    first.send({"type": "beat"})
    stage.until(lambda: lead.messages)
    (spoke,) = [at for at, (up, _) in enumerate(relay.seen) if len(up) > before[at][0]]
    relay.inject(bytes(relay.seen[spoke][0][before[spoke][0] :]), connection=1 - spoke)
    stage.until(lambda: lead.closed)
    assert lead.closed[0][0] is not lead.messages[0][0]
    assert lead.fields == [{"type": "beat"}]
    lead.messages[0][0].send({"type": "order"})
    stage.until(lambda: clients[0][1].messages)
    down = bytes(relay.seen[spoke][1][before[spoke][1] :])
    relay.inject(down, connection=spoke, towards="client")
    stage.until(lambda: clients[0][1].closed)
    assert clients[0][1].fields == [{"type": "order"}]


def test_a_wrong_token_is_refused_on_both_sides(stage: Stage) -> None:
    server, lead = stage.server(limits=FAST)
    client, host = stage.client(server.address, OTHER_TOKEN, limits=FAST)
    stage.until(lambda: client.num_refused >= 5)
    assert len(lead.notes) == 1
    assert "127.0.0.1 does not hold this job's token" in lead.notes[0]
    assert len(host.notes) == 1
    assert "when it was shown our token: it probably has another one" in host.notes[0]
    assert (lead.opened, host.opened, client.is_open) == ([], [], False)
    assert not client.send({"type": "join"})


def test_who_says_nothing_or_drips_is_dropped_at_the_deadline(stage: Stage) -> None:
    server, lead, client, _ = joined(stage, limits=FAST)
    began = time.monotonic()
    with caller(server) as mute, caller(server) as slow:
        hello = iter(b"closeranks-control" + b"c\x00\x01" + bytes(32))
        stage.until(lambda: len(server._unauthenticated) == 2)
        while not is_closed_by_other(slow):
            slow.send(bytes([next(hello)]))
            limit = time.monotonic() + 0.02
            while time.monotonic() < limit:
                stage.turn(limit)
        stage.until(lambda: is_closed_by_other(mute))
    took = time.monotonic() - began
    assert took >= 0.3, "and what drips does not move the deadline: it had not said its hello"
    assert lead.notes == ["127.0.0.1 did not show within 0.3 s that it holds the token; it was refused."]
    assert client.is_open  # type: ignore[attr-defined]
    assert server.deadline is None


def test_strangers_are_bounded_and_who_joins_still_gets_in(stage: Stage) -> None:
    server, lead = stage.server(limits=ChannelLimits(handshake_s=60.0, max_unauthenticated=8))
    flood = [socket.create_connection(server.address) for _ in range(40)]
    stage.until(lambda: sum(map(is_closed_by_other, flood)) >= 32)
    assert len(server._unauthenticated) == 8
    _, host = stage.client(server.address)
    stage.until(lambda: host.opened and lead.opened)
    assert len(server._unauthenticated) <= 8
    assert lead.notes == ["127.0.0.1 has too many connections without a token; it was refused."]
    for stranger in flood:
        stranger.close()


def test_one_who_does_not_read_is_closed_and_the_others_go_on(stage: Stage) -> None:
    server, lead = stage.server(limits=ChannelLimits(max_queue_bytes=4 << 20))
    client, host = stage.client(server.address)
    relay = stage.relay(server)
    _, deaf = stage.client(relay.address)
    stage.until(lambda: len(lead.opened) == 2 and host.opened and deaf.opened)
    good, bad = sorted(
        lead.opened,
        key=lambda connection: connection.remote_address.port != client.connection._endpoint.getsockname()[1],
    )  # type: ignore[union-attr]
    for ends in relay._ends:  # nobody reads any more, and nobody closes
        for end in ends:
            stage.loop.unwatch(end.fileno())
    before = resident_bytes()
    message = {"text": "x" * 100_000}
    num_sent = 0
    while bad.send(message):
        num_sent += 1
        assert num_sent < 1000
    assert lead.closed == [], "told from the loop's turn, never from send"
    assert not bad.send(message)
    stage.until(lambda: lead.closed)
    assert lead.closed[0][0] is bad
    assert "does not read" in lead.closed[0][1]
    assert resident_bytes() - before < 30 << 20
    assert good.send({"type": "on"})
    stage.until(lambda: host.messages)
    assert server.connections == (good,)


def test_memory_stays_bounded_under_a_flood_of_strangers(stage: Stage) -> None:
    server, lead = stage.server(limits=ChannelLimits(max_unauthenticated=32))
    blob = os.urandom(1 << 20)
    for turn in range(2):
        before = resident_bytes()
        for _ in range(100):
            with caller(server) as stranger:
                stranger.setblocking(False)
                stranger.send(b"closeranks-control" + b"c\x00\x01" + bytes(32) if turn else blob)
                stage.turn(time.monotonic())
        stage.until(lambda: not server._unauthenticated)
        assert resident_bytes() - before < 8 << 20
    assert len(lead.notes) == 1


def test_a_caller_that_ends_in_the_middle_is_told_apart(stage: Stage) -> None:
    server, lead = stage.server()
    relay = stage.relay(server)
    client, host = stage.client(relay.address)
    stage.until(lambda: lead.opened and host.opened)
    place = len(relay.seen[0][0])
    relay.up = lambda data, at: data if at < place else data[:30]
    client.send({"text": "x" * 200})
    stage.until(lambda: not lead.opened[0]._channel.is_between_messages)
    relay.cut()
    stage.until(lambda: lead.closed and host.closed)
    assert lead.closed[0][1] == "closed the connection in the middle of a message"
    assert lead.messages == []


def test_a_callback_may_close_anything(stage: Stage) -> None:
    """Messages that came along with the one that made us close are not passed on."""
    heard: list[dict[str, object]] = []

    def close_all(connection: ControlConnection, fields: dict[str, object]) -> None:
        heard.append(fields)
        server.close()

    server, lead = stage.server(on_message=close_all)
    clients = [stage.client(server.address, limits=FAST) for _ in range(4)]
    stage.until(lambda: len(lead.opened) == 4 and all(host.opened for _, host in clients))
    for client, _ in clients:
        for number in range(3):
            client.send({"number": number})
    stage.until(lambda: all(host.closed for _, host in clients))
    assert heard == [{"number": 0}]
    assert lead.closed == []
    assert not is_listening(server.address.port)


def test_a_number_that_the_kernel_gives_out_again_is_not_taken_for_the_old_one(stage: Stage) -> None:
    """Both are ready in one turn; the first that is heard ends the other, and something new gets its number."""
    new: list[socket.socket] = []
    ready: list[str] = []

    def replace(connection: ControlConnection, fields: dict[str, object]) -> None:
        (other,) = set(server.connections) - {connection}
        fd = other._fd
        other.close()
        new.extend(socket.socketpair())
        assert new[0].fileno() == fd
        stage.loop.watch(fd, lambda: ready.append("new"))

    server, lead = stage.server(on_message=replace)
    clients = [stage.client(server.address) for _ in range(2)]
    stage.until(lambda: len(lead.opened) == 2 and all(host.opened for _, host in clients))
    for client, _ in clients:
        client.send({})
    stage.loop.run_once(time.monotonic() + 5)
    assert len(new) == 2
    assert (lead.closed, lead.notes, ready) == ([], [], [])
    stage.loop.unwatch(new[0].fileno())
    for end in new:
        end.close()


def test_without_a_descriptor_left_it_rests_and_goes_on(stage: Stage) -> None:
    server, lead = stage.server()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    endpoint = socket.socket()
    spare = [os.open("/dev/null", os.O_RDONLY) for _ in range(2)]
    client, host = stage.client(server.address)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))
    filled = []
    try:
        endpoint.setblocking(False)
        endpoint.connect_ex(server.address)
        while True:
            try:
                filled.append(os.open("/dev/null", os.O_RDONLY))
            except OSError:
                break
        stage.loop.run_once(time.monotonic() + 5)
        assert "Hosts that want to join have to wait (Too many open files)" in lead.notes[0]
        assert server.deadline is not None
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in (*filled, *spare):
            os.close(fd)
    stage.until(lambda: lead.opened and host.opened)
    endpoint.close()
    stage.until(lambda: not server._unauthenticated)
    assert client.is_open
