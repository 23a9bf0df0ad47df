"""What happens to whole hosts, under every layout: rows for the table of ``make drills``.

Two hosts with two workers each. Where the run is resized on the way, losses are equal to 1e-9, in float64.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest

from closeranks.core.events import RankLost, RanksClosed
from closeranks.telemetry.run_log.recorder import read_events
from tests.faults.rows import Row
from tests.hosts.commands import wait_until_clean
from tests.hosts.jobs import Site
from tests.hosts.lab import Lab

SHAPES = {"ddp": "zero=0", "zero3": "zero=3", "tensor": "tensor=2", "pipeline": "pipeline=2"}
WHOLE = {"ddp": "data=4", "zero3": "data=4 zero=3", "tensor": "data=2 tensor=2", "pipeline": "data=2 pipeline=2"}
"""What these are on four workers."""
LOST, GONE, GROWN, LEFT = (
    "a whole host, another stands by",
    "a whole host, nobody takes its place",
    "scale-up: a host joins",
    "scale-down: a host leaves (SIGTERM)",
)
HOSTS = (LOST, GONE, GROWN, LEFT)
CLOSE = 1e-9
PER_HOST = 2


def drill_hosts(folder: Path, shape: str) -> list[Row]:
    layout = f"layout={SHAPES[shape]}"
    calm = undisturbed(folder / "calm", layout)
    tries: list[tuple[tuple[str, ...], Callable[[Path, str, dict[int, float]], list[Row]]]] = [
        ((LOST,), partial(lost, is_replaced=True)),
        ((GONE,), partial(lost, is_replaced=False)),
        ((GROWN, LEFT), joined_and_left),
    ]
    rows: list[Row] = []
    for number, (names, drill) in enumerate(tries):
        try:
            rows += drill(folder / str(number), layout, calm)
        except AssertionError as error:
            print(error, file=sys.stderr)
            rows += [Row(name, "", None, None, None, str(error).strip().splitlines()[0][:200]) for name in names]
    return [Row(one.fault, WHOLE[shape], *_rest(one)) for one in rows]


def _rest(row: Row) -> tuple[float | None, float | None, int | None, str, str]:
    return row.detected_s, row.back_s, row.num_redone, row.problem, row.equal


def undisturbed(folder: Path, layout: str) -> dict[int, float]:
    """On two hosts, as in every drill: on one, gradients would be summed in another order."""
    site = Site(folder, PER_HOST).prepare()
    with Lab(2) as lab:
        first, second = lab.hosts
        lead = site.lead(first, layout)
        other = site.join(second, first)
        assert (lead.wait(), other.wait()) == (0, 0), f"{lead.said}\n{other.said}"
    return site.losses


def lost(folder: Path, layout: str, calm: dict[int, float], *, is_replaced: bool) -> list[Row]:
    """A host loses its power; another stands by, or nobody takes its place."""
    site = Site(folder, PER_HOST).prepare()
    with Lab(3) as lab:
        first, second, third = lab.hosts
        site.hold(5)
        lead = site.lead(first, layout)
        site.join(second, first)
        site.wait_until_held(5, num_ranks=2 * PER_HOST, lead=lead)
        staying = [lead]
        if is_replaced:
            staying.append(site.join(third, first))
            site.wait_for_event("host", lead, change="joined", host="h2")
        struck_at = time.time()
        second.power_off()
        site.wait_for_event("rank_lost", lead, kind="host", host="h1")
        site.let_go(5)
        assert [one.wait() for one in staying] == [0] * len(staying), "\n".join(one.said for one in staying)
        wait_until_clean(first, third)
    (row,) = _told(site, [(LOST if is_replaced else GONE, struck_at)], "yes" if is_replaced else "to 1e-09")
    assert row.num_redone in (0, 1), row
    assert site.losses == (calm if is_replaced else pytest.approx(calm, rel=CLOSE)), "other losses"
    return [row]


def joined_and_left(folder: Path, layout: str, calm: dict[int, float]) -> list[Row]:
    site = Site(folder, PER_HOST).prepare()
    with Lab(2) as lab:
        first, second = lab.hosts
        site.hold(3)
        site.hold(7)
        lead = site.lead(first, layout, hosts="1:2")
        site.wait_until_held(3, num_ranks=PER_HOST, lead=lead)
        other = site.join(second, first)
        site.wait_for_event("host", lead, change="joined", host="h1")
        site.let_go(3)
        site.wait_until_held(7, generation=1, num_ranks=2 * PER_HOST, lead=lead)
        other.send(signal.SIGTERM)
        site.wait_for_event("host", lead, change="leaving", host="h1")
        site.let_go(7)
        assert (other.wait(), lead.wait()) == (0, 0), f"{lead.said}\n{other.said}"
        wait_until_clean(first, second)
    rows = _told(site, [(GROWN, None), (LEFT, None)], "to 1e-09")
    assert [row.num_redone for row in rows] == [0, 0], rows
    assert site.losses == pytest.approx(calm, rel=CLOSE), "other losses"
    return rows


def _told(site: Site, strikes: Sequence[tuple[str, float | None]], equal: str) -> list[Row]:
    """One row for every strike, in their order: the agent has told of each. What was asked for is not detected."""
    told = list(read_events(site.run / "metrics" / "agent.jsonl"))
    ended = [values["at"] for values, event in told if isinstance(event, RankLost)]
    closed = [event for _, event in told if isinstance(event, RanksClosed)]
    assert len(ended) == len(closed) == len(strikes), f"{len(ended)} faults and {len(closed)} recoveries were told"
    return [
        Row(name, "", struck_at and max(0.0, at - struck_at), one.seconds, one.num_redone, equal=equal)
        for (name, struck_at), at, one in zip(strikes, ended, closed, strict=True)
    ]
