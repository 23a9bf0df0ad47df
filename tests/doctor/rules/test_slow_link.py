"""A slow link among several hosts is named, with the ranks behind it; a network that is slow everywhere is not."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from closeranks.core.events import Resources
from closeranks.doctor.diagnose import diagnose
from closeranks.doctor.finding import Finding
from tests.doctor.made import even, facts

NAMES = ("10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4")
FAST, SLOW = 100e6, 10e6
_Links = Mapping[tuple[int, int], float]


def _ring(num: int, slow: _Links) -> _Links:
    return {(host, (host + 1) % num): FAST for host in range(num)} | dict(slow)


def _found(num: int, links: _Links, waited_s: float = 0.1) -> list[Finding]:
    used = {
        host: Resources(
            seconds=5.0,
            host_number=host,
            host_wide={"net_retransmits": 50.0},
            address=NAMES[host],
            link_bytes_per_s={NAMES[there]: speed for (here, there), speed in links.items() if here == host},
        )
        for host in range(num)
    }
    about = {"num_trainable": 1_000_000}
    return list(diagnose(facts(*even({"data.all_reduce": waited_s}, num), used=used, started=about)).findings)


@pytest.mark.parametrize(
    ("num", "slow", "said"),
    [
        (4, {(2, 3): SLOW}, "The link from the host of rank 2 (10.0.0.3) to the host of rank 3 (10.0.0.4) is slow"),
        (4, {(1, 2): SLOW, (2, 3): SLOW}, "The network of the host of rank 2 (10.0.0.3) is slow"),
        (3, {(1, 2): SLOW, (2, 0): 1.1 * SLOW}, "The network of the host of rank 2 (10.0.0.3) is slow"),
        (3, {(2, 0): SLOW}, "The link from the host of rank 2 (10.0.0.3) to the host of rank 0 (10.0.0.1) is slow"),
    ],
)
def test_the_slow_one_is_named(num: int, slow: _Links, said: str) -> None:
    (first,) = _found(num, _ring(num, slow))
    assert first.cause == "straggler"
    assert first.what.startswith(said)
    assert "at 10 MB/s" in first.evidence[0]
    assert "carry 100 MB/s" in first.evidence[0]
    assert first.gain == pytest.approx(0.51 * 0.9, rel=0.01)
    assert "10 TCP segments a second again" in first.evidence[2]


@pytest.mark.parametrize(
    ("num", "links"),
    [
        (4, _ring(4, {})),
        (4, dict.fromkeys(_ring(4, {}), SLOW)),
        (4, _ring(4, {(2, 3): 0.7 * FAST})),
        (2, {(0, 1): SLOW, (1, 0): FAST}),
    ],
    ids=["all fast", "all slow", "a little slower", "two hosts"],
)
def test_links_that_are_alike_or_cannot_be_compared(num: int, links: _Links) -> None:
    assert "straggler" not in {one.cause for one in _found(num, links)}


def test_a_slow_link_that_nobody_waits_for() -> None:
    assert _found(4, _ring(4, {(2, 3): SLOW}), waited_s=0.005) == []
