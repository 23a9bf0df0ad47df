"""A host is lost, its agent is killed, its cable is pulled: the run goes on, and nothing is left behind.

Where one rank alone is held, the other waits for it in a collective when its host goes.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.hosts.commands import KILLED, wait_for, wait_until_clean
from tests.hosts.jobs import STEPS, Site
from tests.hosts.lab import Lab

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(400)]

CLOSE = 1e-9
"""After a resize sums are taken in another order."""


def test_a_host_that_loses_its_power_leaves_a_smaller_run(
    tmp_path: Path, site: Site, undisturbed: dict[int, float]
) -> None:
    with Lab(2) as lab:
        first, second = lab.hosts
        lead = site.lead(first)
        site.join(second, first)
        site.hold(5, rank=1)
        site.wait_until_held(5, rank=1, lead=lead)
        second.power_off()
        site.wait_for_event("rank_lost", lead, kind="host", host="h1")
        site.let_go(5, rank=1)
        assert lead.wait() == 0, lead.said
        wait_until_clean(first)
    (closed,) = site.agent_events("ranks_closed")
    assert (closed.world_size, closed.num_redone <= 1) == (1, True)
    assert site.losses == pytest.approx(undisturbed, rel=CLOSE)


@pytest.mark.slow  # with sharded state, below, the same and more
def test_a_host_that_stands_by_takes_over_bit_by_bit(tmp_path: Path, site: Site, undisturbed: dict[int, float]) -> None:
    with Lab(3) as lab:
        first, second, third = lab.hosts
        lead = site.lead(first)
        site.join(second, first)
        site.hold(5)
        site.wait_until_held(5, lead=lead)
        spare = site.join(third, first)
        site.wait_for_event("host", lead, change="joined", host="h2")
        second.power_off()
        site.wait_for_event("rank_lost", lead, kind="host", host="h1")
        site.let_go(5)
        assert (lead.wait(), spare.wait()) == (0, 0), f"{lead.said}\n{spare.said}"
        wait_until_clean(first, third)
    (closed,) = site.agent_events("ranks_closed")
    assert (closed.world_size, closed.num_redone <= 1) == (2, True)
    assert site.losses == undisturbed


def test_workers_die_with_their_agent(tmp_path: Path, site: Site, undisturbed: dict[int, float]) -> None:
    with Lab(2) as lab:
        first, second = lab.hosts
        lead, other = site.lead(first), site.join(second, first)
        site.hold(5, rank=1)
        site.wait_until_held(5, rank=1, lead=lead)
        assert len(other.workers()) == 1
        wait_for(lambda: len(other.descendants()) == 3, "a zygote, its heir and a worker", other)
        other.send(signal.SIGKILL)
        assert other.wait() == KILLED
        wait_until_clean(second)
        site.wait_for_event("rank_lost", lead, kind="host", host="h1")
        site.let_go(5, rank=1)
        assert lead.wait() == 0, lead.said
        wait_until_clean(first)
    assert site.losses == pytest.approx(undisturbed, rel=CLOSE)


def test_a_partition_is_won_by_the_leads_side_and_the_other_comes_back(
    tmp_path: Path, site: Site, undisturbed: dict[int, float]
) -> None:
    with Lab(2) as lab:
        first, second = lab.hosts
        lead, other = site.lead(first), site.join(second, first)
        site.hold(4)
        site.hold(8)
        site.wait_until_held(4, lead=lead)
        (worker,) = other.workers()
        second.cut()
        site.wait_for_event("rank_lost", lead, kind="host", host="h1")
        assert not Path(f"/proc/{worker}").exists(), "the cut host has killed its worker before it was called lost"
        site.let_go(4)
        site.wait_until_held(8, generation=1, num_ranks=1, lead=lead)
        second.heal()
        site.wait_for_event("host", lead, times=2, change="joined", host="h1")
        site.let_go(8)
        assert (lead.wait(), other.wait()) == (0, 0), f"{lead.said}\n{other.said}"
        wait_until_clean(first, second)
    shrunk, grown = site.agent_events("ranks_closed")
    assert (shrunk.world_size, grown.world_size, grown.num_redone) == (1, 2, 0)
    assert site.losses == pytest.approx(undisturbed, rel=CLOSE)


def test_the_other_hosts_copy_saves_a_shard(tmp_path: Path, site: Site) -> None:
    """Each half of the state has its only other copy on the other host."""
    with Lab(3) as lab:
        first, second, third = lab.hosts
        lead = site.lead(first, "layout.zero=3")
        site.join(second, first)
        site.hold(5)
        site.wait_until_held(5, lead=lead)
        spare = site.join(third, first)
        site.wait_for_event("host", lead, change="joined", host="h2")
        second.power_off()
        site.wait_for_event("rank_lost", lead, kind="host", host="h1")
        site.let_go(5)
        assert (lead.wait(), spare.wait()) == (0, 0), f"{lead.said}\n{spare.said}"
        plain = Site(tmp_path / "plain").prepare()
        alone = plain.command(first, "train", "job.toml", "-n", 2, "layout.zero=3")
        assert alone.wait() == 0, alone.said
    (closed,) = site.agent_events("ranks_closed")
    assert (closed.world_size, closed.num_redone <= 1) == (2, True)
    assert sorted(site.losses) == list(range(1, STEPS + 1))
    assert site.losses == plain.losses
