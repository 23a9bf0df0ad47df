"""The speed of a connection while it has something to send, of real sockets."""

from __future__ import annotations

import socket
import time
from threading import Thread

import pytest

from closeranks.telemetry.resources.link_usage import link_speeds, read_links
from closeranks.telemetry.resources.reading import used_between

HERE, THERE = "127.0.0.7", "127.0.0.8"
NUM_BYTES = 1 << 22


def test_what_a_connection_sent_is_counted_and_loopback_is_not() -> None:
    with socket.create_server((THERE, 0)) as listening, socket.create_server((HERE, 0)) as local:
        far = socket.create_connection(listening.getsockname(), source_address=(HERE, 0))
        near = socket.create_connection(local.getsockname(), source_address=(HERE, 0))
        with far, near, listening.accept()[0] as receiver, local.accept()[0] as echo:
            before, began = read_links(), time.monotonic()
            near.sendall(b"x" * 1000)
            sending = Thread(target=far.sendall, args=(bytes(NUM_BYTES),))
            sending.start()
            received = 0
            while received < NUM_BYTES:
                received += len(receiver.recv(1 << 20))
            sending.join()
            assert echo.recv(1)
            receiver.sendall(b"x")
            assert far.recv(1), "all that was sent before is acknowledged"
            after, seconds = read_links(), time.monotonic() - began
    used = used_between(before, after, seconds)
    assert before.subject == after.subject == HERE
    assert NUM_BYTES <= used[f"{THERE} bytes"] <= NUM_BYTES + 1
    assert 0 <= used[f"{THERE} busy_s"] <= seconds
    assert not any(name.startswith(f"{HERE} ") and value > 1 for name, value in used.items())


@pytest.mark.parametrize(
    ("sent", "busy_s", "found"),
    [(1e7, 0.5, {"10.0.0.2": 2e7}), (1e5, 0.5, {}), (1e7, 0.001, {})],
    ids=["enough", "too few bytes", "too short"],
)
def test_speeds_are_told_of_what_was_enough_to_tell(sent: float, busy_s: float, found: dict[str, float]) -> None:
    assert link_speeds({"10.0.0.2 bytes": sent, "10.0.0.2 busy_s": busy_s}, 1.0) == found
