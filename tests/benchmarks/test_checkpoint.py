from __future__ import annotations

from typing import Any

import pytest
from checkpoint_rank import Found
from checkpoint_savers import ASYNCHRONOUS, MAKERS
from checkpoint_work import MIB, Work

from checkpoint import delays, judge, rates, summarise, undisturbed
from tests.benchmarks.scripts import run_script


def test_delays_are_taken_within_a_round_of_the_slower_rank() -> None:
    """The machine was busy in the second round; all paid for it."""
    ranks = [{"a": [1.0, 9.0], "b": [1.1, 9.1]}, {"a": [1.2, 8.0], "b": [1.0, 8.5]}]
    assert undisturbed(ranks) == pytest.approx([1.15, 9.05])
    assert delays([2.15, 10.05], undisturbed(ranks)) == pytest.approx([1.0, 1.0])


def measured() -> Found:
    seconds = {name: [3.0, 3.2] for name in MAKERS}
    rates_s = {"written": [1.0], "dd": [0.9], "blake3": [0.5], "committed": [2.0]}
    return Found(8, 100 * MIB, {name: [1.0, 1.2] for name in MAKERS}, seconds, seconds, rates_s, {"dcp, cold": [1.0]})


def test_the_rate_counts_all_ranks_and_the_last_to_be_done() -> None:
    slow = measured()
    slow.rates_s["written"] = [1.25]
    found = rates([measured(), slow])
    assert found["written"]["median"] == pytest.approx(200 * MIB / 1e6 / 1.25, abs=1)
    assert found["share"] == pytest.approx(0.9 / 1.25, abs=0.01)
    assert summarise([measured(), slow])["delay_s"]["dcp"]["median"] == 2.0


def figures(share: float = 0.9, without: str = "", **delay: float) -> dict[str, Any]:
    found = {name: {"median": delay.get(name.split()[0].replace(".", "_"), 1.0)} for name in MAKERS if name != without}
    return {"delay_s": found, "rate_mb_s": {"share": share}}


@pytest.mark.parametrize(
    ("found", "met"),
    [
        (figures(closeranks=0.1), [True, True, True]),
        (figures(closeranks=0.2), [False, True, True]),
        (figures(closeranks=0.1, dcp=0.05), [True, False, True]),
        (figures(closeranks=0.1, share=0.8), [True, True, False]),
        (figures(closeranks=0.1, without="torch.save"), [False, True, True]),
        (figures(closeranks=0.1, without=ASYNCHRONOUS[0]), [True, False, True]),
    ],
)
def test_every_goal_is_asked_beside_all_its_rivals(found: dict[str, Any], met: list[bool]) -> None:
    assert list(judge(found).values()) == met


def test_the_state_is_as_large_as_it_must_be() -> None:
    assert Work().state_bytes >= 512 * MIB


def run(*arguments: str) -> dict[str, Any]:
    closing = run_script("checkpoint.py", "--quick", "--rounds", "1", "--timeout-s", "90", *arguments)
    assert not closing["met"]  # sizes that mean nothing meet no goal
    found: dict[str, Any] = closing["figures"]
    return found


@pytest.mark.world
@pytest.mark.slow
def test_it_runs_without_processes_of_dcp() -> None:
    names = ["closeranks", "torch.save", "dcp", "dcp thread", "dcp thread staged"]
    found = run("--no-memory", *(word for name in names for word in ("--only", name)))
    assert set(found["delay_s"]) == set(names)
    assert set(found["load_s"]) == {f"{name}, {how}" for name in names[:3] for how in ("cold", "cached")}
    assert found["rate_mb_s"]["share"] > 0


@pytest.mark.world
@pytest.mark.slow
def test_processes_of_dcp_save_and_memory_is_told() -> None:
    names = ["closeranks", "dcp process staged"]
    found = run(*(word for name in names for word in ("--only", name)))
    assert set(found["delay_s"]) == set(found["memory_mib_per_rank"]) == set(names)
