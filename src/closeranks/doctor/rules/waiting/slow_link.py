"""Do ranks wait for the network of one host, or for the link between two, that is slower than the others?

A collective takes as long as its slowest link, and all ranks wait for it alike. Which link it is shows in how fast each
rank sends while it has something to send (``telemetry.resources.link_usage``). With two hosts there is but one link,
and nothing to compare it with.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from statistics import fmean, median

from closeranks.doctor.finding import Finding, milliseconds
from closeranks.doctor.run_facts import RunFacts

_SLOW = 2.0
"""The other links are so many times as fast."""
_LEAST_SHARE = 0.15

_Link = tuple[str, str]
"""Addresses of the sender and of the receiver."""


def find(facts: RunFacts) -> Iterator[Finding]:
    ranks, speeds = _ranks_by_address(facts), _speeds(facts)
    exposed_s = sum(facts.exposed_s.values())
    if len(ranks) < 3 or len(speeds) < 3 or facts.share(exposed_s) < _LEAST_SHARE:
        return
    slowest = min(speeds, key=lambda link: speeds[link])
    slow = {link for link, speed in speeds.items() if speed * _SLOW <= _fastest_half(speeds)}
    if slowest not in slow:
        return
    others = median(speed for link, speed in speeds.items() if link not in slow)
    sender, receiver = (_named(address, ranks) for address in slowest)
    yield Finding(
        "straggler",
        f"{_subject(slowest, slow, speeds, ranks)}: all ranks wait for it.",
        (
            f"{sender} sends to {receiver} at {_rate(speeds[slowest])} while it has something to send, the other links "
            f"carry {_rate(others)} in the median",
            f"ranks wait {milliseconds(exposed_s)} of a step of {milliseconds(facts.step_s)} for collectives; the kind "
            "is network",
            *_retransmits(facts, ranks[slowest[0]]),
        ),
        "Look at the card, the cable and the port of this host, at what else uses them, and at its route; or leave the "
        "host out.",
        gain=facts.share(exposed_s) * (1 - speeds[slowest] / others),
        explains=frozenset({"exposed-communication"}),
    )


def _ranks_by_address(facts: RunFacts) -> Mapping[str, list[int]]:
    found: dict[str, list[int]] = defaultdict(list)
    for rank, used in facts.resources.items():
        if used and used[-1].address:
            found[used[-1].address].append(rank)
    return found


def _speeds(facts: RunFacts) -> Mapping[_Link, float]:
    """Between hosts of this run, in the mean of all samples."""
    samples: dict[_Link, list[float]] = defaultdict(list)
    hosts = _ranks_by_address(facts)
    for used in facts.resources.values():
        for one in used:
            for address, speed in one.link_bytes_per_s.items():
                if address in hosts and one.address in hosts:
                    samples[one.address, address].append(speed)
    return {link: fmean(values) for link, values in samples.items()}


def _fastest_half(speeds: Mapping[_Link, float]) -> float:
    """The median of the faster half: of three links, two may touch the slow host."""
    ordered = sorted(speeds.values())
    return median(ordered[len(ordered) // 2 :])


def _subject(worst: _Link, slow: set[_Link], speeds: Mapping[_Link, float], ranks: Mapping[str, list[int]]) -> str:
    """The host that all slow links have in common, if all of its links are slow; else the one link."""
    for host in worst:
        own = {link for link in speeds if host in link}
        if len(own) > 1 and own == slow:
            return f"The network of {_named(host, ranks)} is slow"
    return f"The link from {_named(worst[0], ranks)} to {_named(worst[1], ranks)} is slow"


def _named(address: str, ranks: Mapping[str, list[int]]) -> str:
    numbers = ranks[address]
    return f"the host of rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))} ({address})"


def _retransmits(facts: RunFacts, ranks: list[int]) -> Iterator[str]:
    rate = max((facts.used_per_s(rank, "host_wide", "net_retransmits") for rank in ranks), default=0.0)
    if rate >= 1:
        yield f"it sends {rate:.3g} TCP segments a second again"


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e6:.3g} MB/s"
