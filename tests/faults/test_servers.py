"""Parameter servers that fail: the run comes out the same, in every bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.cases import FROZEN, SERVER_CASES, Case
from tests.faults.conftest import Calm
from tests.faults.drills import possible
from tests.faults.harness import assert_same, assert_struck, go
from tests.faults.jobs import SERVERS

pytestmark = [pytest.mark.world, pytest.mark.timeout(300)]


@pytest.mark.parametrize(
    "case", [SERVER_CASES[0], *(pytest.param(case, marks=pytest.mark.slow) for case in SERVER_CASES[1:])]
)
def test_servers_that_fail(tmp_path: Path, calm: Calm, case: Case) -> None:
    if not possible(case):
        pytest.skip(f"this machine lacks what is needed to inject: {case.needs}")
    ran = go(tmp_path, SERVERS, *case.settings, faults=case.faults)
    assert_same(calm(SERVERS), ran)
    assert_struck(ran, *case.kinds)
    assert {lost.rank for lost in ran.lost if lost.rank >= 0} <= {2, 3}


@pytest.mark.slow
def test_stale_servers_go_on_from_the_last_synchronization(tmp_path: Path) -> None:
    stale = ("sync.server.mode=stale", "sync.server.bound=1", "sync.server.every=4")
    ran = go(tmp_path, SERVERS, *stale, faults="kill(rank=3, step=7), kill(rank=0, step=11)")
    assert ran.code == 0, ran.said
    assert_struck(ran, "killed", "killed", num_redone=4)
    assert sorted(ran.course.losses) == list(range(1, 17))
    assert ran.samples.conflicts == ()


def test_the_cases_strike_servers_alone() -> None:
    assert FROZEN in SERVER_CASES[1].names[0]
    assert all(f"rank={rank}" not in case.faults for case in SERVER_CASES for rank in (0, 1))
