"""The simulation against accounts computed by hand; all figures are worker-seconds of 8 workers over 1,000 s."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

from closeranks.plan.goodput.scenario import CLOSING_RANKS, RecoveryStrategy
from closeranks.plan.goodput.time_rows import ROW_WORDS
from closeranks.telemetry.goodput import time_account
from tests.plan.goodput.cases import FREE_SNAPSHOTS, RESTART, failure, run, seconds


def test_losses_have_the_words_of_a_real_run() -> None:
    simulated_only = {"waiting", "missing"}
    shared = {row: words for row, words in ROW_WORDS.items() if row not in simulated_only}
    assert shared == {row: time_account.ROW_WORDS[row] for row in shared}
    assert not simulated_only & set(time_account.ROW_WORDS)


@pytest.mark.parametrize("strategy", [RESTART, FREE_SNAPSHOTS])
@pytest.mark.parametrize(("stall_s", "cycles"), [(25, 8), (3, 25), (0, 10)])
def test_without_failures_goodput_is_what_saves_leave_exactly(
    strategy: RecoveryStrategy, stall_s: float, cycles: int
) -> None:
    period_s = 100
    found = run(strategy, stall_s=stall_s, durable_s=30, save_every_s=100, wall_s=cycles * (period_s + stall_s))
    assert Fraction(found.rows["useful"], 8 * found.wall_us) == Fraction(period_s, period_s + int(stall_s))
    assert seconds(found) == {"useful": 800.0 * cycles} | ({"save": 8.0 * stall_s * cycles} if stall_s else {})


def test_snapshots_cost_their_share_of_every_step_exactly() -> None:
    found = run(replace(CLOSING_RANKS, snapshot_share=0.25))
    assert seconds(found) == {"useful": 6400, "snapshot": 1600}


def test_a_restart_redoes_what_came_after_the_last_durable_save() -> None:
    """Work to 100 s, save (5 s), work to 205 s, save, durable at 225 s; the crash at 250 s finds 240 s of work done."""
    found = run(RESTART, failure(250), save_every_s=100, stall_s=5, durable_s=20)
    assert seconds(found) == {
        "useful": 8 * 615,
        "save": 8 * 30,
        "redone": 8 * 40,
        "detection": 8 * 15,
        "recovery": 2400,
    }
    assert (found.interruptions, found.num_rollbacks) == ({"test": 1}, 1)


def test_a_save_that_is_not_durable_yet_is_of_no_use() -> None:
    """At 220 s the save of 205 s is still on its way: 110 s of work are redone, from the save at 100 s."""
    found = run(RESTART, failure(220), save_every_s=100, stall_s=5, durable_s=20)
    assert seconds(found)["redone"] == 8 * 110


def test_closing_ranks_loses_the_step_that_was_cut_short() -> None:
    """The crash at 253 s finds 243 s of work: 3 s are redone, and 18 s pass until training resumes."""
    found = run(FREE_SNAPSHOTS, failure(253), save_every_s=100, stall_s=5, durable_s=20)
    assert seconds(found) == {"useful": 8 * 934, "save": 8 * 45, "redone": 24, "detection": 24, "recovery": 120}
    assert found.num_rollbacks == 0


def test_fewer_snapshots_lose_more_steps() -> None:
    found = run(replace(FREE_SNAPSHOTS, snapshot_every=4), failure(253))
    assert seconds(found)["redone"] == 8 * 13


def test_a_hang_takes_longer_to_notice() -> None:
    """Closing ranks waits 8 steps here, a restart for the default timeout of ten minutes."""
    assert seconds(run(FREE_SNAPSHOTS, failure(250, shows="hang")))["detection"] == 8 * 80
    assert seconds(run(RESTART, failure(250, shows="hang")))["detection"] == 8 * 600


def test_a_failure_during_recovery_begins_it_anew() -> None:
    found = seconds(run(RESTART, failure(250), failure(300)))
    assert (found["detection"], found["recovery"]) == (8 * 30, 8 * (35 + 300))


def test_it_shrinks_while_a_host_is_missing_and_grows_when_it_is_back() -> None:
    """Six workers train from 268 s to 550 s; shrinking and growing take 15 s each."""
    found = run(FREE_SNAPSHOTS, failure(250, hosts=1, repair_s=300))
    assert seconds(found) == {"useful": 7172, "missing": 2 * 282, "detection": 24, "recovery": 240}
    assert found.repair_host_s == 300


def test_it_shrinks_by_whole_replicas() -> None:
    """With replicas of two hosts, the loss of one costs both."""
    found = run(FREE_SNAPSHOTS, failure(250, hosts=1, repair_s=300), replica_hosts=2)
    assert seconds(found)["missing"] == 4 * 282


def test_it_does_not_shrink_below_the_least_share() -> None:
    found = seconds(run(FREE_SNAPSHOTS, failure(250, hosts=1, repair_s=300), least_share=0.8))
    assert found == {"useful": 8 * (1000 - 300 - 15), "detection": 24, "waiting": 8 * 297, "recovery": 120}


def test_a_restart_waits_for_the_host() -> None:
    found = run(RESTART, failure(250, hosts=1, repair_s=300))
    assert seconds(found) == {
        "useful": 8 * 150, "redone": 8 * 250, "detection": 8 * 15, "waiting": 8 * 285, "recovery": 8 * 300,
    }  # fmt: skip


def test_with_a_spare_it_does_not_wait() -> None:
    found = run(RESTART, failure(250, hosts=1, repair_s=300), spares=1)
    assert "waiting" not in seconds(found)
    again = run(RESTART, failure(250, hosts=1, repair_s=1e6), failure(600, hosts=1, repair_s=1e6), spares=1)
    assert seconds(again)["waiting"] == 8 * 385


def test_a_cold_spare_is_waited_for_and_paid_for_while_it_is_used() -> None:
    """It is started at 250 s and arrives at 350 s; the host that is back at 550 s relieves it."""
    found = run(RESTART, failure(250, hosts=1, repair_s=300), cold_spares=1, cold_s=100)
    assert seconds(found)["waiting"] == 8 * 85
    assert found.cold_host_s == 300


def test_a_slow_host_slows_all_until_it_is_evicted() -> None:
    """At half the pace from 100 s to 700 s, then 15 s to replace it."""
    found = run(FREE_SNAPSHOTS, failure(100, shows="slow", slowdown=2.0, hosts=1, repair_s=1e6), spares=1)
    assert seconds(found) == {"useful": 8 * 685, "straggler": 8 * 300, "recovery": 120}
    assert (found.num_evicted, found.num_interruptions) == (1, 0)


def test_without_a_spare_a_slow_host_is_evicted_only_if_that_is_faster() -> None:
    """Three of four hosts are faster than four at half the pace, but not than four at 1.2 times the step."""
    slow = {"shows": "slow", "hosts": 1, "repair_s": 1e6}
    assert run(FREE_SNAPSHOTS, failure(100, slowdown=2.0, **slow)).num_evicted == 1
    kept = run(FREE_SNAPSHOTS, failure(100, slowdown=1.2, **slow))
    assert kept.num_evicted == 0
    assert kept.rows["straggler"] == 8 * 150_000_000
    assert run(RESTART, failure(100, slowdown=2.0, **slow), wall_s=5000).num_evicted == 0


def test_what_is_slow_until_it_is_restarted_takes_no_host() -> None:
    found = run(FREE_SNAPSHOTS, failure(100, shows="slow", slowdown=2.0))
    assert seconds(found) == {"useful": 8 * 685, "straggler": 8 * 300, "recovery": 120}


def test_silent_corruption_goes_back_to_a_checkpoint_from_before() -> None:
    """Wrong from 250 s on, found after 300 s: what came after the save at 200 s is redone, by either strategy."""
    strategy = replace(FREE_SNAPSHOTS, silent_s=300)
    found = run(strategy, failure(250, shows="silent"), save_every_s=100)
    assert seconds(found) == {"useful": 8 * 635, "redone": 8 * 350, "recovery": 120}
    assert (found.interruptions, found.num_rollbacks) == ({"test": 1}, 1)


def test_enough_notice_loses_no_work() -> None:
    found = run(RESTART, failure(250, notice_s=600), durable_s=20)
    assert seconds(found) == {"useful": 8 * 680, "save": 8 * 20, "recovery": 2400}
    assert (found.num_planned, found.num_interruptions) == (1, 0)
    assert seconds(run(FREE_SNAPSHOTS, failure(255, notice_s=600))) == {"useful": 8 * 985, "recovery": 120}


def test_too_short_a_notice_loses_work_but_is_noticed_at_once() -> None:
    found = run(RESTART, failure(250, notice_s=10), durable_s=20)
    assert seconds(found) == {"useful": 8 * 450, "redone": 8 * 250, "recovery": 2400}
    assert found.num_planned == 0
    short = run(FREE_SNAPSHOTS, failure(255, notice_s=9))  # a step takes 10 s, and half of one is done
    assert (short.num_planned, short.num_interruptions, seconds(short)["redone"]) == (0, 1, 8 * 5)


def test_the_loss_of_both_copies_leaves_the_checkpoint() -> None:
    """Of four hosts, the second that is lost holds the other copy with a probability of one third."""
    first, lost = failure(250, hosts=1, repair_s=10), {"hosts": 1, "repair_s": 10}
    for copies, rollbacks in ((0.33, 1), (0.34, 0)):
        found = run(FREE_SNAPSHOTS, first, failure(260, copies=copies, **lost), save_every_s=100, spares=2)
        assert found.num_rollbacks == rollbacks
        assert seconds(found).get("redone", 0) == 8 * 50 * rollbacks
    together = run(FREE_SNAPSHOTS, failure(250, hosts=2, repair_s=10, copies=0.33), save_every_s=100, spares=2)
    assert together.num_rollbacks == 1


def test_a_host_that_is_missing_cannot_fail() -> None:
    """Of four hosts one is missing from 250 s on, so a failure on the last quarter of hosts does not happen."""
    first = failure(250, hosts=1, repair_s=1e6)
    assert run(FREE_SNAPSHOTS, first, replace(failure(500), place=0.76)).num_interruptions == 1
    assert run(FREE_SNAPSHOTS, first, replace(failure(500), place=0.74)).num_interruptions == 2
