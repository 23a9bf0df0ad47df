"""Without its lead a job ends, and nothing that its memory held is lost."""

from __future__ import annotations

import pytest

from tests.hosts.commands import wait_until_clean
from tests.hosts.jobs import Site
from tests.hosts.lab import Lab

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(400)]


@pytest.mark.parametrize("zero", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_what_the_others_held_is_rescued_and_resumed_from(site: Site, undisturbed: dict[int, float], zero: int) -> None:
    """With ZeRO-3 half of the state was the lead's: the other host kept a copy of it."""
    layout = f"layout.zero={zero}"
    with Lab(2) as lab:
        first, second = lab.hosts
        lead, other = site.lead(first, layout), site.join(second, first)
        site.hold(6)
        site.wait_until_held(6, lead=lead)
        lead.send(9)
        assert other.wait() == 1, other.said
        assert "was lost, and the job with it" in other.said
        wait_until_clean(first, second)
        assert list((site.run / "rescued" / "h1").glob("box-*"))
        assert not list((site.run / "checkpoints").glob("step-*"))
        site.let_go(6)
        again = ("run.folder=again", "checkpoint.resume=run", layout)
        resumed = site.command(first, "train", "job.toml", "-n", 2, *again)
        assert resumed.wait() == 0, resumed.said
        assert "run/rescued" in resumed.said
    before, after = site.losses_of("run"), site.losses_of("again")
    first_step = min(after)
    assert 5 <= first_step - 1 <= 6, "at most one step is done again"
    together = {**before, **after}
    if zero:
        assert together == pytest.approx(undisturbed, rel=1e-9)
    else:
        assert together == undisturbed
