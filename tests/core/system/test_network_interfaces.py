"""An address is found on the interface that has it."""

import psutil
import pytest

from closeranks.core.errors import SetupError
from closeranks.core.system.network_interfaces import interface_of, own_address


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_by_any_name(host: str) -> None:
    assert interface_of(host) == "lo"


def test_the_address_that_leads_away_is_on_an_interface_of_ours() -> None:
    name = interface_of(own_address())
    assert own_address() in [entry.address for entry in psutil.net_if_addrs()[name]]


@pytest.mark.parametrize(
    ("host", "words"), [("192.0.2.77", "no network interface"), ("no.such.host.invalid", "not known")]
)
def test_what_is_not_ours_is_refused_in_words(host: str, words: str) -> None:
    with pytest.raises(SetupError, match=words):
        interface_of(host)
