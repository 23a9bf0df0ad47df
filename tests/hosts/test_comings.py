"""Hosts come, are refused, and go as they were asked to: the run grows and shrinks at a step, and loses none."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

import pytest

from tests.hosts.commands import wait_for, wait_until_clean
from tests.hosts.jobs import PORT, Site
from tests.hosts.lab import Lab

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(400)]

CLOSE = 1e-9
NOISE = """
import os, socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2])), 5) as line:
    line.sendall(os.urandom(5000))
    line.recv(1)
"""


def test_a_host_that_joins_later_makes_the_run_larger_and_one_that_leaves_smaller(
    site: Site, undisturbed: dict[int, float]
) -> None:
    with Lab(2) as lab:
        first, second = lab.hosts
        site.hold(3)
        site.hold(7)
        lead = site.lead(first, hosts="1:2")
        site.wait_until_held(3, num_ranks=1, lead=lead)
        other = site.join(second, first)
        site.wait_for_event("host", lead, change="joined", host="h1")
        site.let_go(3)
        site.wait_until_held(7, generation=1, lead=lead)
        here = [(0, "h0", 7), (1, "h1", 7)]
        wait_for(lambda: site.shown_workers == here, "the status to show the workers of both hosts", lead)
        other.send(signal.SIGTERM)
        site.wait_for_event("host", lead, change="leaving", host="h1")
        site.let_go(7)
        assert other.wait() == 0, other.said
        wait_until_clean(second)
        assert lead.wait() == 0, lead.said
        wait_until_clean(first)
    grown, shrunk = site.agent_events("ranks_closed")
    assert [(one.world_size, one.num_redone) for one in (grown, shrunk)] == [(2, 0), (1, 0)]
    assert [one.kind for one in site.agent_events("rank_lost")] == ["resize", "preempted"]
    assert site.losses == pytest.approx(undisturbed, rel=CLOSE)


def test_who_does_not_belong_to_the_job_is_refused_and_disturbs_nobody(
    site: Site, undisturbed: dict[int, float]
) -> None:
    with Lab(3) as lab:
        first, second, third = lab.hosts
        lead, other = site.lead(first), site.join(second, first)
        site.hold(5)
        site.wait_until_held(5, lead=lead)
        wrong = site.folder / "wrong"
        wrong.write_text("fedcba9876543210" * 4)
        wrong.chmod(0o600)
        impostor = site.join(third, first, token=wrong)
        assert impostor.wait() == 2, impostor.said
        assert "token" in impostor.said
        third.run([sys.executable, "-c", NOISE, first.address, str(PORT)])
        site.let_go(5)
        assert (lead.wait(), other.wait()) == (0, 0), f"{lead.said}\n{other.said}"
        wait_until_clean(first, second, third)
    assert site.agent_events("rank_lost") == []
    assert site.losses == undisturbed


def test_whoever_waits_for_hosts_is_told_how_they_join_and_can_give_up(site: Site) -> None:
    with Lab(1) as lab:
        (host,) = lab.hosts
        lead = site.lead(host)
        what = f"closeranks agent --join {host.address}:{PORT} -n 1 --token-file {site.token}"
        waits = "Waiting for another host (2 in all; joined: h0)"
        wait_for(lambda: waits in lead.said.replace("\n", " "), "the lead to wait", lead)
        assert what in lead.said.replace("\n", " ")
        lead.send(signal.SIGINT)
        assert lead.wait() == 130, lead.said
        wait_until_clean(host)


@pytest.mark.slow
def test_two_agents_on_one_machine_are_two_hosts(tmp_path: Path, site: Site, undisturbed: dict[int, float]) -> None:
    with Lab(1) as lab:
        (host,) = lab.hosts
        options = ("--token-file", site.token)
        lead = site.command(host, "train", "job.toml", "-n", 1, "--hosts", 2, "--listen", f"127.0.0.1:{PORT}", *options)
        other = site.command(host, "agent", "--join", f"127.0.0.1:{PORT}", "-n", 1, *options)
        assert (lead.wait(), other.wait()) == (0, 0), f"{lead.said}\n{other.said}"
        wait_until_clean(host)
    assert re.search(r"as h0-\d+ with", other.said)
    assert site.losses == undisturbed
