"""Somebody stands still, and others wait for it on another host: the right one is given up, or nobody."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.hosts.commands import wait_for, wait_until_clean
from tests.hosts.jobs import Site
from tests.hosts.lab import Lab

pytestmark = [pytest.mark.hosts, pytest.mark.slow, pytest.mark.timeout(400)]

FLOOR_S = 3.0
FLOOR = f"elastic.hang_floor_s={FLOOR_S}"


def test_a_stopped_worker_of_another_host_is_found_and_replaced(site: Site, undisturbed: dict[int, float]) -> None:
    with Lab(2) as lab:
        first, second = lab.hosts
        lead, other = site.lead(first, FLOOR), site.join(second, first)
        site.hold(5)
        site.wait_until_held(5, lead=lead)
        (worker,) = other.workers()
        os.kill(worker, signal.SIGSTOP)
        site.let_go(5)
        lost = site.wait_for_event("rank_lost", lead)
        assert (lost.kind, lost.rank, lost.host) == ("stopped", 1, "h1")
        assert (lead.wait(), other.wait()) == (0, 0), f"{lead.said}\n{other.said}"
        wait_until_clean(first, second)
    assert site.losses == undisturbed


def test_who_waits_for_a_patient_one_elsewhere_is_not_given_up(site: Site, undisturbed: dict[int, float]) -> None:
    with Lab(2) as lab:
        first, second = lab.hosts
        lead, other = site.lead(first, FLOOR), site.join(second, first)
        site.hold(5, rank=0)
        site.wait_until_held(5, rank=0, lead=lead)
        time.sleep(2.5 * FLOOR_S)  # nothing can be waited for: what must not happen is that anything does
        site.let_go(5, rank=0)
        assert (lead.wait(), other.wait()) == (0, 0), f"{lead.said}\n{other.said}"
    assert site.agent_events("rank_lost") == []
    assert site.losses == undisturbed


def test_a_lead_that_was_stopped_goes_on_with_its_own_workers(site: Site, undisturbed: dict[int, float]) -> None:
    """The other host's lease runs out meanwhile, so that it has killed its worker; the lead's own was never gone."""
    with Lab(2) as lab:
        first, second = lab.hosts
        lead, other = site.lead(first), site.join(second, first)
        site.hold(5)
        site.wait_until_held(5, lead=lead)
        (worker,) = other.workers()
        lead.send(signal.SIGSTOP)
        wait_for(lambda: worker not in other.descendants(), "the other host to kill its worker", other)
        lead.send(signal.SIGCONT)
        lost = site.wait_for_event("rank_lost", lead)
        assert (lost.kind, lost.host) == ("host", "h1")
        site.let_go(5)
        assert (lead.wait(), other.wait()) == (0, 0), f"{lead.said}\n{other.said}"
        wait_until_clean(first, second)
    assert site.losses == pytest.approx(undisturbed, rel=1e-9)
