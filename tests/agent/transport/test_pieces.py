"""The small decisions: what is told, how long is waited, who goes when there are too many."""

from __future__ import annotations

import itertools
import socket

from hypothesis import given
from hypothesis import strategies as st

from closeranks.agent.transport.client import Backoff
from closeranks.agent.transport.dns_lookup import SocketAddress, decode_answer, numeric_addresses
from closeranks.agent.transport.refusal_log import RefusalLog
from closeranks.agent.transport.server import busiest_address


def test_an_address_is_spoken_of_once_and_then_counted() -> None:
    refusal_log = RefusalLog()
    first = refusal_log.line_for("10.0.0.7", "speaks HTTP", now=0.0)
    assert first == "10.0.0.7 speaks HTTP; it was refused."
    assert [refusal_log.line_for("10.0.0.7", "speaks HTTP", now=at) for at in (1.0, 2.0, 599.0)] == [None] * 3
    again = refusal_log.line_for("10.0.0.7", "speaks TLS", now=601.0)
    assert again == "10.0.0.7 speaks TLS; it was refused. It was refused 3 more times before."


def test_many_addresses_fill_a_bounded_number_of_lines_and_entries() -> None:
    refusal_log = RefusalLog()
    lines = [refusal_log.line_for(f"fd00::{number:x}", "speaks HTTP", now=number * 1e-4) for number in range(5000)]
    assert len([line for line in lines if line]) == 10
    later = refusal_log.line_for("10.0.0.1", "speaks TLS", now=61.0)
    assert later == "10.0.0.1 speaks TLS; it was refused. 4990 refusals of other addresses were not reported."
    for number in range(5000):
        refusal_log.line_for(f"fd00::{number:x}", "speaks HTTP", now=100.0 * number)
    assert len(refusal_log._known) <= 256


@given(st.integers(0, 1000), st.floats(0.001, 1.0), st.floats(1.0, 100.0))
def test_waits_grow_to_a_bound_and_follow_from_the_seed(seed: int, first_s: float, longest_s: float) -> None:
    backoff, same = Backoff(first_s, longest_s, seed), Backoff(first_s, longest_s, seed)
    waits = [backoff.next_s() for _ in range(30)]
    assert waits == [same.next_s() for _ in range(30)]
    bounds = itertools.accumulate(range(29), lambda bound, _: min(2 * bound, longest_s), initial=first_s)
    assert all(bound / 2 <= wait <= bound for wait, bound in zip(waits, bounds, strict=True))
    backoff.reset()
    assert backoff.next_s() <= first_s


def test_two_hosts_do_not_wait_alike() -> None:
    assert Backoff(0.1, 5.0, 1).next_s() != Backoff(0.1, 5.0, 2).next_s()


@given(st.lists(st.sampled_from("abc"), min_size=1))
def test_who_has_the_most_connections_goes_first(hosts: list[str]) -> None:
    assert hosts.count(busiest_address(hosts)) == max(hosts.count(host) for host in hosts)


def test_a_numeric_address_asks_nobody() -> None:
    assert numeric_addresses("127.0.0.1", 5) == [SocketAddress(socket.AF_INET, ("127.0.0.1", 5))]
    assert numeric_addresses("::1", 5) == [SocketAddress(socket.AF_INET6, ("::1", 5, 0, 0))]
    assert numeric_addresses("localhost", 5) == []
    assert numeric_addresses("a" * 300, 5) == []


def test_an_answer_is_places_or_a_reason() -> None:
    assert decode_answer(b'[[2, ["127.0.0.1", 5]]]') == ([SocketAddress(socket.AF_INET, ("127.0.0.1", 5))], "")
    assert decode_answer(b'"Name or service not known"') == ([], "Name or service not known")
    assert decode_answer(b"") == ([], "the lookup gave no result")
