"""Requests: what a set of them becomes in the vote, and how long each is brought to it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from closeranks.core import requests
from closeranks.core.requests import (
    DRAIN,
    NUM_SLOTS,
    REQUESTS,
    SAVE,
    PendingRequests,
    RunRequest,
    decode,
    define,
    encode,
)


@pytest.fixture
def all_defined(monkeypatch: pytest.MonkeyPatch) -> list[RunRequest]:
    """As many kinds as the vote has room for."""
    monkeypatch.setattr(REQUESTS, "_entries", dict(REQUESTS._entries))
    monkeypatch.setattr(requests, "_order", list(requests._order))
    monkeypatch.setattr(requests, "_weights", dict(requests._weights))
    while len(requests._order) < 2 * NUM_SLOTS:
        define(f"kind {len(requests._order)}")
    return requests._order


def added_up(*ranks: set[RunRequest]) -> list[float]:
    return [sum(column) for column in zip(*map(encode, ranks), strict=True)]


@given(data=st.data())
def test_all_ranks_read_what_any_asked_for(data: st.DataObject) -> None:
    kinds = st.sets(st.sampled_from([REQUESTS[kind] for kind in REQUESTS]))
    ranks = data.draw(st.lists(kinds, min_size=1, max_size=6))
    assert decode(added_up(*ranks)) == set().union(*ranks)


def test_every_kind_has_room_of_its_own_with_a_million_ranks(all_defined: list[RunRequest]) -> None:
    for request in all_defined:
        sums = [count * float(1 << 20) for count in encode({request})]
        assert decode(sums) == {request}
        others = [request_ for request_ in all_defined if request_ != request]
        assert decode([count * float(1 << 20) for count in encode(others)]) == set(others)


def test_more_kinds_than_the_vote_holds_are_refused(all_defined: list[RunRequest]) -> None:
    with pytest.raises(ValueError, match="room for 8 kinds of requests: there is none left for 'one more'"):
        define("one more")
    assert "one more" not in list(REQUESTS)


def test_a_kind_is_defined_once() -> None:
    with pytest.raises(ValueError, match="request 'drain' is registered twice"):
        define("drain")


def test_what_does_not_stay_is_handed_out_once() -> None:
    pending = PendingRequests()
    assert pending.take() == set()
    pending.add(SAVE)
    pending.add(DRAIN)
    assert [pending.take() for _ in range(3)] == [{SAVE, DRAIN}, {DRAIN}, {DRAIN}]
    assert DRAIN in pending
    assert SAVE not in pending
