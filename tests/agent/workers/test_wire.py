"""Messages over a stream that is cut anywhere."""

from __future__ import annotations

import socket

from hypothesis import given
from hypothesis import strategies as st

from closeranks.agent.workers.wire import LineBuffer, WorkerChannel, encode_message

MESSAGES = st.lists(st.dictionaries(st.text(), st.integers() | st.text() | st.none()), max_size=6)


@given(MESSAGES, st.data())
def test_messages_survive_any_cutting(messages: list[dict[str, object]], data: st.DataObject) -> None:
    stream = b"".join(encode_message(message) for message in messages)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    lines = LineBuffer()
    heard = []
    for first, last in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        heard += lines.feed(stream[first:last])
    assert heard == messages


def test_a_channel_never_blocks_and_loses_nothing() -> None:
    ours, theirs = socket.socketpair()
    channel = WorkerChannel(ours)
    message = {"text": "x" * 5_000_000}
    channel.send(message)
    assert channel.outbox, "five megabytes do not fit a socket's buffer"
    lines = LineBuffer()
    heard: list[dict[str, object]] = []
    while not heard:
        heard += lines.feed(theirs.recv(1 << 16))
        channel.flush()
    assert heard == [message]
    assert not channel.outbox
    assert channel.receive() is None
    theirs.close()
    assert channel.receive() == []
    assert not channel.is_open
    channel.send({"to": "nobody"})
    assert not channel.outbox
    channel.close()
