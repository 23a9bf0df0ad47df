"""What an address is, and what listens there."""

from __future__ import annotations

import pytest

from closeranks.core.errors import SetupError
from closeranks.core.system.address import Address, is_loopback, listen_on, parse_address, parse_listen


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("lead:29400", "lead", 29400), ("10.0.0.1:1", "10.0.0.1", 1), ("[fd00::1]:65535", "fd00::1", 65535)],
)
def test_addresses_read_back(text: str, host: str, port: int) -> None:
    assert parse_address(text) == Address(host, port)
    assert str(Address(host, port)) == text


@pytest.mark.parametrize("text", ["", "lead", "lead:", ":1", "lead:0", "lead:65536", "lead:x", "lead:-1", "fd00::1:5"])
def test_what_is_no_address_is_told(text: str) -> None:
    with pytest.raises(SetupError, match="is not an address"):
        parse_address(text)


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("10.0.0.1", "10.0.0.1", 0),
        ("10.0.0.1:29400", "10.0.0.1", 29400),
        ("fd00::1", "fd00::1", 0),
        ("[fd00::1]", "fd00::1", 0),
        ("[fd00::1]:29400", "fd00::1", 29400),
        ("lead", "lead", 0),
        ("lead:0", "lead", 0),
    ],
)
def test_a_place_to_listen_may_leave_its_port_out(text: str, host: str, port: int) -> None:
    assert parse_listen(text) == Address(host, port)


@pytest.mark.parametrize("text", ["10.0.0.1:99999", "10.0.0.1:\u00b2", "lead:", "fd00::1:x", "[]", ":"])
def test_a_place_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(SetupError, match="is not an address"):
        parse_listen(text)


def test_a_port_that_is_taken_or_not_ours_is_told() -> None:
    with listen_on("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(SetupError, match=f"cannot listen on 127.0.0.1:{port} .Address already in use"):
            listen_on("127.0.0.1", port)
    listen_on("127.0.0.1", port).close()
    with pytest.raises(SetupError, match="Choose an address of this machine"):
        listen_on("192.0.2.1", 0)
    with pytest.raises(SetupError, match="does not resolve"):
        listen_on("no-such-host.invalid", 0)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.9.9.9", "::1"])
def test_loopback_is_seen_without_a_lookup(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "fd00::1", "localhost.example", "lead", ""])
def test_others_may_reach_any_other_address(host: str) -> None:
    assert not is_loopback(host)
