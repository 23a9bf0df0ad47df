"""Both sides without sockets: any byte that is altered, cut, repeated, moved or foreign is refused."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from closeranks.agent.transport.authenticated_channel import AuthenticatedChannel, Fields
from closeranks.agent.transport.framing import HELLO_BYTES, MAGIC, ChannelError, ChannelHello, Role, derive_signers
from closeranks.core.errors import CloseranksError
from tests.agent.transport.stage import OTHER_TOKEN, TOKEN

MOST = 1 << 16
UP = [{"type": "join", "host": "h1"}, {"type": "beat", "at": 1.5}, {"text": "grüß", "none": None}]
DOWN = [{"type": "welcome", "rank": 3}, {"list": [1, 2, {"deep": True}]}]
NAMES: tuple[Role, Role] = ("client", "server")
FRAME_BYTES = len(
    derive_signers(TOKEN, ChannelHello("client", bytes(32)), ChannelHello("server", bytes(32))).client.encode_frame(b"")
)
"""What a frame takes beside its body."""


def pair(
    *, token: object = None, nonces: tuple[bytes, bytes] | None = None
) -> tuple[AuthenticatedChannel, AuthenticatedChannel]:
    first, second = nonces or (None, None)
    client = AuthenticatedChannel("client", TOKEN, max_bytes=MOST, nonce=first)
    return client, AuthenticatedChannel("server", token or TOKEN, max_bytes=MOST, nonce=second)  # type: ignore[arg-type]


def take(side: AuthenticatedChannel) -> bytes:
    data = bytes(side.outbox)
    side.outbox.clear()
    return data


def shake(client: AuthenticatedChannel, server: AuthenticatedChannel) -> tuple[bytes, bytes]:
    """The handshake; returns what each side sent."""
    sent = [b"", b""]
    for _ in range(2):
        for at, (source, target) in enumerate(((client, server), (server, client))):
            data = take(source)
            sent[at] += data
            assert list(target.feed(data)) == []
    return sent[0], sent[1]


def recorded(nonces: tuple[bytes, bytes]) -> tuple[bytes, bytes]:
    """Two streams of a whole conversation; with the same nonces, the same streams."""
    client, server = pair(nonces=nonces)
    up, down = shake(client, server)
    for fields in UP:
        client.queue(fields)
    for fields in DOWN:
        server.queue(fields)
    return up + take(client), down + take(server)


NONCES = (bytes(range(32)), bytes(range(100, 132)))
STREAMS = recorded(NONCES)


def hear(role: Role, stream: bytes, piece: int = 1 << 20) -> tuple[list[Fields], str]:
    """What one side makes of a stream, and why it refused it if it did. Its own nonce is that of the record."""
    side = AuthenticatedChannel(role, TOKEN, max_bytes=MOST, nonce=NONCES[NAMES.index(role)])
    heard: list[Fields] = []
    try:
        for start in range(0, len(stream), piece):
            heard.extend(side.feed(stream[start : start + piece]))  # what came before a refusal stays in the list
    except ChannelError as error:
        return heard, error.what
    waiting = len(side._hello_buffer) + (len(side._reader._buffer) if side._reader else 0)
    assert waiting <= MOST + FRAME_BYTES + HELLO_BYTES
    return heard, ""


STREAM_TO: dict[Role, bytes] = {"server": STREAMS[0], "client": STREAMS[1]}
SAID: dict[Role, list[Fields]] = {"server": UP, "client": DOWN}


def test_both_are_known_to_each_other_and_messages_arrive_in_order() -> None:
    client, server = pair()
    assert not client.is_open
    assert not server.is_open
    shake(client, server)
    assert client.is_open
    assert server.is_open
    for fields in UP:
        client.queue(fields)
    for fields in DOWN:
        server.queue(fields)
    assert list(server.feed(take(client))) == UP
    assert list(client.feed(take(server))) == DOWN
    assert client.is_between_messages
    assert server.is_between_messages


@pytest.mark.parametrize("role", NAMES)
@pytest.mark.parametrize("piece", [1, 2, 7, 1 << 20])
def test_the_record_is_understood_however_it_is_cut(role: Role, piece: int) -> None:
    assert hear(role, STREAM_TO[role], piece) == (SAID[role], "")


@pytest.mark.parametrize("role", NAMES)
def test_each_flipped_bit_is_refused_at_once(role: Role) -> None:
    stream = STREAM_TO[role]
    for bit in range(8 * len(stream)):
        changed = bytearray(stream)
        changed[bit // 8] ^= 1 << bit % 8
        heard, why = hear(role, bytes(changed))
        assert why, f"bit {bit} of what the {role} was sent"
        assert heard == SAID[role][: len(heard)]
        assert len(heard) < len(SAID[role])


@pytest.mark.parametrize("role", NAMES)
def test_cut_at_every_byte_nothing_but_whole_messages_comes_out(role: Role) -> None:
    stream = STREAM_TO[role]
    for length in range(len(stream)):
        heard, why = hear(role, stream[:length])
        assert why == ""
        assert heard == SAID[role][: len(heard)]
        assert len(heard) < len(SAID[role])


def frames_of(stream: bytes) -> list[bytes]:
    """The hello, then each frame."""
    pieces, rest = [stream[:HELLO_BYTES]], stream[HELLO_BYTES:]
    while rest:
        length = FRAME_BYTES + int.from_bytes(rest[:4], "big")
        pieces.append(rest[:length])
        rest = rest[length:]
    return pieces


@pytest.mark.parametrize("role", NAMES)
@given(st.data())
def test_frames_in_any_other_order_are_refused(role: Role, data: st.DataObject) -> None:
    pieces = frames_of(STREAM_TO[role])
    chosen = data.draw(st.lists(st.sampled_from(range(len(pieces))), max_size=8))
    heard, why = hear(role, b"".join(pieces[at] for at in chosen))
    in_order = [at for at, expected in zip(chosen, range(len(pieces)), strict=False) if at == expected]
    in_order = in_order[: next((at for at, which in enumerate(chosen) if which != at), len(chosen))]
    assert heard == SAID[role][: max(0, len(in_order) - 2)]
    assert bool(why) == (chosen != in_order)


@pytest.mark.parametrize("role", NAMES)
@given(st.data())
def test_any_splice_of_the_record_lets_only_what_was_said_through(role: Role, data: st.DataObject) -> None:
    """Bytes taken out, put in, overwritten: messages are a prefix of the true ones, and it ends or waits."""
    stream = bytearray(STREAM_TO[role])
    for _ in range(data.draw(st.integers(1, 3))):
        first = data.draw(st.integers(0, len(stream)))
        last = data.draw(st.integers(first, min(len(stream), first + 60)))
        stream[first:last] = data.draw(st.binary(max_size=60))
    heard, why = hear(role, bytes(stream), data.draw(st.sampled_from([1, 13, 1 << 20])))
    assert heard == SAID[role][: len(heard)]
    if not STREAM_TO[role].startswith(bytes(stream[: len(STREAM_TO[role])])):
        assert why or len(heard) < len(SAID[role])


@pytest.mark.parametrize("role", NAMES)
@given(st.binary(min_size=1, max_size=400))
def test_any_bytes_never_open_it(role: Role, data: bytes) -> None:
    heard, why = hear(role, data)
    assert heard == []
    assert why or MAGIC.startswith(data[: len(MAGIC)])


@pytest.mark.parametrize("role", NAMES)
@given(st.integers(0, len(MAGIC)), st.binary(max_size=200))
def test_any_end_after_a_true_beginning_never_opens_it(role: Role, length: int, data: bytes) -> None:
    heard, _ = hear(role, STREAM_TO[role][: length * 5] + data)
    assert heard == []


def test_a_record_played_to_another_connection_is_refused() -> None:
    """The server draws a nonce of its own each time, as does the client."""
    for role in NAMES:
        fresh = AuthenticatedChannel(role, TOKEN, max_bytes=MOST)
        with pytest.raises(ChannelError, match="does not hold this job's token"):
            list(fresh.feed(STREAM_TO[role]))
        assert not fresh.is_open


def test_what_a_side_said_is_not_taken_when_it_comes_back() -> None:
    client, server = pair(nonces=NONCES)
    shake(client, server)
    client.queue({"type": "beat"})
    frame = take(client)
    with pytest.raises(ChannelError, match="altered, replayed or reordered"):
        list(client.feed(frame))
    assert list(server.feed(frame)) == [{"type": "beat"}]
    with pytest.raises(ChannelError, match="altered, replayed or reordered"):
        list(server.feed(frame))


def test_the_tag_of_a_body_is_none_of_a_length() -> None:
    """A body of four bytes is shaped like a length; its tag must not make it one."""
    body = (1).to_bytes(4, "big")
    sealed = derive_signers(
        TOKEN, ChannelHello("client", NONCES[0]), ChannelHello("server", NONCES[1])
    ).client.encode_frame(body)
    checking = derive_signers(TOKEN, ChannelHello("client", NONCES[0]), ChannelHello("server", NONCES[1])).client
    with pytest.raises(ChannelError):
        checking.check_length(body + sealed[-32:-16])


def test_an_echo_of_the_hello_is_refused() -> None:
    client, _ = pair()
    with pytest.raises(ChannelError, match="on the same side"):
        list(client.feed(take(client)))


def test_frames_of_another_connection_fit_nowhere() -> None:
    first, second = pair(), pair()
    for sides in (first, second):
        shake(*sides)
    first[0].queue({"type": "leave"})
    with pytest.raises(ChannelError, match="altered, replayed or reordered"):
        list(second[1].feed(take(first[0])))


def test_the_same_nonces_of_both_sides_with_roles_exchanged_fit_nowhere() -> None:
    """One who answers with the caller's own nonce gets the same key, and still no tag that fits."""
    nonce = bytes(32)
    client, server = pair(nonces=(nonce, nonce))
    list(server.feed(take(client)))
    list(client.feed(take(server)))
    proof = take(client)
    with pytest.raises(ChannelError, match="does not hold"):
        list(client.feed(proof))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"GET / HTTP/1.1\r\nHost: lead\r\n\r\n", "speaks HTTP"),
        (b"POST /x", "speaks HTTP"),
        (b"\x16\x03\x01\x02\x00\x01\x00", "speaks TLS"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "speaks SSH"),
        (b"\x00" * 8, "does not speak"),
        (b"\x1b[2J evil", "does not speak"),
    ],
)
def test_foreign_languages_are_named_and_not_repeated(data: bytes, words: str) -> None:
    for role in NAMES:
        _, why = hear(role, data)
        assert words in why
        assert why.isprintable()


def test_a_stranger_is_known_by_its_first_byte() -> None:
    assert hear("server", b"G")[1]
    assert hear("server", MAGIC[:1]) == ([], "")


def test_another_version_is_told_to_both() -> None:
    future = ChannelHello("client", bytes(32), version=3).encode()
    server = AuthenticatedChannel("server", TOKEN, max_bytes=MOST)
    with pytest.raises(ChannelError, match="speaks version 3 of the control channel, this side 2: install the same"):
        list(server.feed(future))
    answer = take(server)
    assert len(answer) == HELLO_BYTES, "a hello, so that it can tell what is wrong, and no more"
    client = AuthenticatedChannel("client", TOKEN, max_bytes=MOST)
    with pytest.raises(ChannelError, match="speaks version 3"):
        list(client.feed(ChannelHello("server", bytes(32), version=3).encode()))


def test_a_stranger_gets_nothing_made_with_the_token() -> None:
    """Whatever it sends before its proof, the answer is a hello: a nonce, which is random."""
    client, server = pair(token=OTHER_TOKEN)
    hello = take(client)
    list(server.feed(hello))
    assert take(server)[:-32] == ChannelHello("server", bytes(32)).encode()[:-32]
    with pytest.raises(ChannelError, match="does not hold"):
        list(server.feed(bytes(FRAME_BYTES)))
    assert take(server) == b""


def test_before_the_proof_no_body_is_waited_for() -> None:
    """Even one who holds the token may not begin with a large message."""
    client, server = pair()
    list(server.feed(take(client)))
    list(client.feed(take(server)))
    client.outbox.clear()
    signer = client._signer
    assert signer is not None
    signer._number = 0
    with pytest.raises(ChannelError, match="sent a message of 1 bytes; at most 0"):
        list(server.feed(signer.encode_frame(b"x")))


def test_sizes_are_kept_on_both_sides() -> None:
    client, server = pair()
    shake(client, server)
    client.queue({"text": "x" * (MOST - 11)})
    (fields,) = server.feed(take(client))
    assert len(json.dumps(fields, separators=(",", ":"))) == MOST
    with pytest.raises(CloseranksError, match="too large to send"):
        client.queue({"text": "x" * (MOST - 10)})
    client._max_bytes = 1 << 30
    client.queue({"text": "x" * MOST})
    with pytest.raises(ChannelError, match=f"at most {MOST} are accepted"):
        list(server.feed(take(client)[:20]))


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[1]", b'"text"', b"\xff\xfe", b"[" * 60_000, b"1" * 5_000, b"{\x00}", '{"a":1}'.encode("utf-16")],
)
def test_one_who_holds_the_token_and_sends_nonsense_is_refused(body: bytes) -> None:
    client, server = pair()
    shake(client, server)
    assert client._signer is not None
    good = client._signer.encode_frame(b'{"good":1}')
    stream = server.feed(good + client._signer.encode_frame(body))
    assert next(stream) == {"good": 1}
    with pytest.raises(ChannelError, match=r"not JSON|not a JSON object"):
        next(stream)


def test_nothing_can_be_queued_before_the_other_side_is_known() -> None:
    client, _ = pair()
    with pytest.raises(CloseranksError, match="before the other side was authenticated"):
        client.queue({})


VALUES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20)


@given(st.dictionaries(st.text(max_size=10), VALUES | st.lists(VALUES, max_size=3), max_size=4))
def test_any_message_arrives_as_it_was(fields: Fields) -> None:
    client, server = pair(nonces=NONCES)
    shake(client, server)
    client.queue(fields)
    assert list(server.feed(take(client))) == [fields]
