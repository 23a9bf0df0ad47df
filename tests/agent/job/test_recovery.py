"""A run begins on as many workers as it was asked for, wherever they are, and never on more."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from closeranks.agent.config import AgentConfig
from closeranks.agent.fault_limits import FaultLimits
from closeranks.agent.job.host_table import HostTable
from closeranks.agent.job.placement import HostPlacement
from closeranks.agent.job.recovery import Recovery
from closeranks.agent.launch_plan import LaunchPlan, RecoverySettings, ResizedLaunch
from closeranks.agent.membership.effects import HostStatusChanged
from closeranks.core.errors import SetupError
from closeranks.core.events import RunStarted, encode


def recovery(num_hosts: int = 2, *, survives: bool = True) -> Recovery:
    """Of a run on hosts of four workers."""
    settings = RecoverySettings(
        FaultLimits(), lambda n, wanted: ResizedLaunch(n, {"of": wanted}) if n != 5 else None, lambda _: ""
    )
    plan = LaunchPlan(
        4, "a:b", Path("logs"), dict(os.environ), AgentConfig(), recovery_settings=settings if survives else None,
        num_hosts=num_hosts, max_hosts=num_hosts,
    )  # fmt: skip
    return Recovery(plan, lambda event: None)


def first(*sizes: int, num_hosts: int = 2, survives: bool = True) -> tuple[tuple[HostPlacement, ...], ResizedLaunch]:
    """Where hosts of these sizes are here."""
    host_table = HostTable("h0")
    for number, size in enumerate(sizes):
        host_table.update(HostStatusChanged(f"h{number}", "joined", num_workers=size), 0.0)
    return recovery(num_hosts, survives=survives).first_placement(host_table)


@pytest.mark.parametrize("survives", [True, False])
def test_more_hosts_than_were_asked_for_stand_by(survives: bool) -> None:
    places, fitted = first(4, 4, 4, survives=survives)
    assert places == (HostPlacement("h0", 4), HostPlacement("h1", 4))
    assert fitted.num_workers == 8


def test_a_host_that_could_take_more_takes_what_is_left() -> None:
    assert first(4, 64)[0] == (HostPlacement("h0", 4), HostPlacement("h1", 4))


def test_with_less_room_a_smaller_run_begins_if_there_is_one() -> None:
    places, fitted = first(4, 2)
    assert places == (HostPlacement("h0", 4), HostPlacement("h1", 2))
    assert (fitted.num_workers, fitted.payload) == (6, {"of": 8})
    with pytest.raises(SetupError, match="cannot begin with 5 of 8 workers"):
        first(4, 1)


def test_figures_are_handed_on_as_long_as_they_hold() -> None:
    """The speed of a device to as many workers on each host; the size of buckets always, as sums depend on it."""
    run, whole, fewer = (
        recovery(),
        (HostPlacement("h0", 4), HostPlacement("h1", 4)),
        (HostPlacement("h0", 4), HostPlacement("h1", 3)),
    )
    payload = {"job": "a job"}

    def begin(places: tuple[HostPlacement, ...]) -> dict[str, object]:
        return dict(run.begin_generation(places, ResizedLaunch(sum(place.num_workers for place in places), payload)))

    assert begin(whole) == payload
    run.on_event(1, encode(RunStarted(rank=1, measured_flops=2e9, bucket_mib=2.0)), 0, 0.0)
    assert begin(whole) == payload, "rank 0 speaks"
    run.on_event(0, encode(RunStarted(measured_flops=1e9, bucket_mib=4.0)), 0, 0.0)
    assert begin(whole) == {**payload, "measured_flops": 1e9, "bucket_mib": 4.0}
    assert begin(fewer) == {**payload, "bucket_mib": 4.0}
    run.on_event(0, encode(RunStarted(measured_flops=3e9, bucket_mib=0.0)), 1, 0.0)  # alone for a while: no buckets
    assert begin(fewer) == {**payload, "measured_flops": 3e9, "bucket_mib": 4.0}
