"""A run on two hosts that nothing disturbed: what all others are compared with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hosts.commands import wait_until_clean
from tests.hosts.jobs import Site
from tests.hosts.lab import Lab, require_lab


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The loss of each step."""
    require_lab()
    folder = tmp_path_factory.mktemp("undisturbed")
    with Lab(2) as lab:
        first, second = lab.hosts
        site = Site(folder / "site").prepare()
        lead, other = site.lead(first), site.join(second, first)
        assert (lead.wait(), other.wait()) == (0, 0), f"{lead.said}\n{other.said}"
        wait_until_clean(first, second)
        return site.losses


@pytest.fixture
def site(tmp_path: Path) -> Site:
    require_lab()
    return Site(tmp_path / "site").prepare()
