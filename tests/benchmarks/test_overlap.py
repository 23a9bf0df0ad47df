from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

import psutil
import pytest
from overlap import FLOOR, PAIRS, QUICK, compare, compare_losses, hidden_share, judge, main, slower, variants

from closeranks.lab.compare.namespaces import unavailable_reason
from tests.benchmarks.conftest import BENCHMARKS
from tests.benchmarks.scripts import run_script

needs_hosts = pytest.mark.skipif(
    bool(unavailable_reason(shaped=True)), reason=unavailable_reason(shaped=True) or "possible"
)


@pytest.mark.parametrize(
    ("fast", "slow", "share"), [(1.0, 2.0, 1.0), (2.0, 2.0, 0.0), (1.5, 2.0, 0.5), (2.5, 2.0, -0.5)]
)
def test_the_hidden_share_is_what_overlap_takes_off_the_communication(fast: float, slow: float, share: float) -> None:
    assert hidden_share(fast, slow, floor=1.0) == share


def test_a_link_that_costs_nothing_hides_nothing() -> None:
    assert hidden_share(0.9, 1.0, floor=1.0) == 0.0


def test_pairs_are_compared_within_their_round() -> None:
    seconds = {FLOOR: [1.0, 2.0], "zero0 with": [1.5, 3.0], "zero0 without": [2.0, 4.0], "zero3 with": [1.0, 1.0]}
    figures = compare(seconds, num_steps=2)
    assert set(figures["pairs"]) == {"zero0"}
    assert figures["floor_ms"]["median"] == 750.0
    assert figures["pairs"]["zero0"]["hidden"] == {"median": 0.5, "low": 0.5, "high": 0.5, "num": 2}
    assert figures["pairs"]["zero0"]["communication_ms"]["median"] == 750.0
    assert figures["pairs"]["zero0"]["speedup"]["low"] == 1.3333


def test_a_turn_is_as_long_as_its_slower_rank_says() -> None:
    assert slower([{"a": [1.0, 5.0]}, {"a": [2.0, 4.0]}]) == {"a": [2.0, 5.0]}


def test_every_pair_has_both_sides_and_they_differ_in_sync_alone() -> None:
    found = variants(QUICK)
    assert len(found) == 2 * len(PAIRS)
    for pair in PAIRS:
        having, without = found[f"{pair} with"], found[f"{pair} without"]
        assert having["layout"] == without["layout"]
        assert having["sync"] != without["sync"]


def pairs(**speedups: float) -> dict[str, Any]:
    return {"losses_agree": True, "pairs": {name: {"speedup": {"median": value}} for name, value in speedups.items()}}


def test_the_goal_is_asked_of_every_pair() -> None:
    assert judge(pairs(zero0=1.2, zero1=1.1, zero3=1.3))
    assert not judge(pairs(zero0=1.2, zero1=1.1, zero3=0.99))
    assert not judge(pairs(zero0=1.2))
    assert not judge({**pairs(zero0=1.2, zero1=1.1, zero3=1.3), "losses_agree": False})


def test_one_curve_agrees_with_nothing() -> None:
    assert not compare_losses({"zero0 with": [3.0]})["losses_agree"]
    assert compare_losses({"zero0 with": [3.0], "zero0 without": [3.0001]})["losses_agree"]


def test_without_root_it_says_so_and_ends_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(sys, "argv", ["overlap.py", "--quick"])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    told = capsys.readouterr()
    assert "network namespaces need root" in told.err
    assert told.err.count("\n") == 1
    assert told.out == ""


@pytest.mark.hosts
@needs_hosts
def test_a_benchmark_that_is_ended_takes_its_hosts_along() -> None:
    command = [sys.executable, str(BENCHMARKS / "overlap.py"), "--quick"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert running.stdout.readline().startswith("two hosts")  # told once they stand
        standing = psutil.Process(running.pid).children(recursive=True)
        running.send_signal(signal.SIGTERM)
        assert running.wait(30) == 143
    assert len(standing) >= 5, "two hosts and their inits, and a switch"
    assert not psutil.wait_procs(standing, timeout=5)[1]


@pytest.mark.hosts
@needs_hosts
@pytest.mark.slow
def test_every_variant_trains_the_same_on_two_hosts() -> None:
    closing = run_script("overlap.py", "--quick", "--rate-mbit", "1000")
    figures = closing["figures"]
    assert figures["left_out"] == {}
    assert set(figures["pairs"]) == set(PAIRS)
    assert figures["losses_agree"]
    assert not closing["met"]  # sizes that mean nothing meet no goal
