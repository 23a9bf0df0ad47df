"""The socket that the store listens on."""

from __future__ import annotations

import socket

import pytest

from closeranks.agent.workers.store_socket import bind_store, store_address
from closeranks.core.errors import SetupError
from tests.agent.traces import is_listening


def test_any_free_port_is_held_and_given_back() -> None:
    with bind_store("127.0.0.1", 0) as listener:
        host, _, port = store_address(listener).rpartition(":")
        assert host == "127.0.0.1"
        assert is_listening(int(port))
        socket.create_connection((host, int(port))).close()
    assert not is_listening(int(port))


def test_a_port_can_be_taken_again_right_after(tmp_path: object) -> None:
    with bind_store("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            peer, _ = listener.accept()
            peer.close()  # this side closes first, so the port fades out in TIME_WAIT here
    bind_store("127.0.0.1", port).close()


@pytest.mark.parametrize(
    ("host", "words"),
    [("192.0.2.1", "the address 192.0.2.1 does not belong to this machine"), ("no.such.invalid", "does not resolve")],
)
def test_a_host_that_is_not_this_one(host: str, words: str) -> None:
    with pytest.raises(SetupError, match=words) as caught:
        bind_store(host, 0)
    assert "agent.host" in caught.value.fix


def test_a_port_in_use() -> None:
    with bind_store("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(SetupError, match=f"port {port} on 127.0.0.1 is already in use") as caught:
            bind_store("127.0.0.1", port)
    assert "agent.port" in caught.value.fix
