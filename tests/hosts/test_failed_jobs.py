"""A job that fails leaves the state that its hosts held in memory where a run can go on from it."""

from __future__ import annotations

import pytest

from tests.hosts.commands import wait_until_clean
from tests.hosts.jobs import Site
from tests.hosts.lab import Lab

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(400)]


def test_every_host_writes_down_what_it_held(site: Site, undisturbed: dict[int, float]) -> None:
    """Of three hosts with a third of the state each, two do not hold all of it."""
    layout = "layout.zero=3"
    with Lab(3) as lab:
        first, *others = lab.hosts
        lead = site.lead(first, layout, 'run.hooks=["tests.hosts.jobs:Fails"]', hosts="3")
        joined = [site.join(host, first) for host in others]
        assert lead.wait() == 2, lead.said
        assert "The state in memory was written to" in lead.said
        for one in joined:
            one.wait()
            assert "the job has failed. The state in memory was written to" in one.said
        wait_until_clean(*lab.hosts)
        assert len(list((site.run / "rescued").glob("h*"))) == 3
        assert not list((site.run / "checkpoints").glob("step-*"))
        again = ("run.folder=again", "checkpoint.resume=run", "run.hooks=[]", layout)
        resumed = site.command(first, "train", "job.toml", "-n", 2, *again)
        assert resumed.wait() == 0, resumed.said
        assert "run/rescued" in resumed.said
    together = {**site.losses_of("run"), **site.losses_of("again")}
    assert together == pytest.approx(undisturbed, rel=1e-9)
