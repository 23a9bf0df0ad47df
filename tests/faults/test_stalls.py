"""Workers that live and get nowhere, or not as they should: noticed, replaced, and nobody can tell from the result."""

from __future__ import annotations

from pathlib import Path

import pytest

from closeranks.core.events import Restored, SaveFailed, SlowRank
from closeranks.elastic.faults.requirements import unavailable_kinds
from closeranks.telemetry.run_log.recorder import read_events
from tests.faults.cases import IMPATIENT, SLOW, order
from tests.faults.conftest import Calm
from tests.faults.harness import Ran, assert_same, assert_struck, go

pytestmark = [pytest.mark.world, pytest.mark.timeout(300)]


def needs(*kinds: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(bool(unavailable_kinds(kinds)), reason="; ".join(unavailable_kinds(kinds).values()))


def _notes(ran: Ran) -> list[str]:
    events = [event for _, event in read_events(ran.run / "metrics" / "rank-00000.jsonl")]
    return [note for event in events if isinstance(event, Restored) for note in event.notes]


def test_asleep_in_python_and_stopped_by_a_signal(tmp_path: Path, calm: Calm) -> None:
    ran = go(tmp_path, "ddp", IMPATIENT, faults="stop(rank=2, step=9)", agent_faults=[order(tmp_path, "sleep", 1, 5)])
    assert_same(calm("ddp"), ran)
    assert_struck(ran, "hang", "stopped")
    assert [lost.rank for lost in ran.lost] == [1, 2]


def test_alone_in_a_collective_and_frozen(tmp_path: Path, calm: Calm) -> None:
    ran = go(tmp_path, "zero3", IMPATIENT, faults="hang(rank=0, step=9)", agent_faults=[order(tmp_path, "alone", 1, 5)])
    assert_same(calm("zero3"), ran)
    assert_struck(ran, "hang", "stopped")
    assert [lost.rank for lost in ran.lost] == [1, 0]


def test_with_the_interpreters_lock_held(tmp_path: Path, calm: Calm) -> None:
    ran = go(tmp_path, "pipeline", IMPATIENT, agent_faults=[order(tmp_path, "gil", 3, 6)])
    assert_same(calm("pipeline"), ran)
    assert_struck(ran, "hang")


@needs("exception", "oom")
def test_exceptions_and_no_more_memory(tmp_path: Path, calm: Calm) -> None:
    faults = "exception(rank=1, step=4), oom(rank=2, step=12)"
    ran = go(tmp_path, "tensor", faults=faults, agent_faults=[order(tmp_path, "raise", 3, 8)])
    assert_same(calm("tensor"), ran)
    assert_struck(ran, "exception", "exception", "oom")
    assert ran.lost[1].rank == 3
    assert "the device said no, this once" in ran.lost[1].cause


def test_a_worker_that_leaves_with_0_in_the_middle_is_lost_not_done(tmp_path: Path, calm: Calm) -> None:
    ran = go(tmp_path, "ddp", agent_faults=[order(tmp_path, "exit", 1, 5), order(tmp_path, "os-exit", 0, 10)])
    assert_same(calm("ddp"), ran)
    assert_struck(ran, "exception", "exception")
    assert "sys.exit(0) was called" in ran.lost[0].cause
    assert "exited with code 0 before its work was done" in ran.lost[1].cause


def test_copies_that_are_torn_or_not_what_was_kept(tmp_path: Path, calm: Calm) -> None:
    """A bit that was turned over is found, and the copy of another taken."""
    ran = go(tmp_path, "zero3", faults="torn(rank=1, step=3), bitflip(rank=2, step=9)")
    assert_same(calm("zero3"), ran)
    assert_struck(ran, "killed", "killed")
    assert any("is damaged" in note for note in _notes(ran)), _notes(ran)


@needs("slow")
def test_who_is_slow_is_named_and_nothing_is_done_again(tmp_path: Path, calm: Calm) -> None:
    faults = "slow(rank=1, step=3, steps=13, share=0.05)"
    ran = go(tmp_path, "ddp", "elastic.stragglers=report", *SLOW, faults=faults)
    assert_same(calm("ddp"), ran)
    assert_struck(ran)
    assert 1 in {slow.rank for slow in ran.told(SlowRank)}


@needs("slow")
def test_who_is_slow_is_replaced_where_the_job_says_so(tmp_path: Path, calm: Calm) -> None:
    faults = "slow(rank=1, step=3, steps=13, share=0.05)"
    ran = go(tmp_path, "zero3", "elastic.stragglers=evict", *SLOW, faults=faults)
    assert_same(calm("zero3"), ran)
    assert_struck(ran, *["slow"] * len(ran.lost), num_redone=0)
    assert 1 in {lost.rank for lost in ran.lost}


@needs("diskfull")
def test_no_room_for_checkpoints(tmp_path: Path, calm: Calm) -> None:
    ran = go(tmp_path, "tensor", "checkpoint.every=2", faults="diskfull(step=4, steps=8)")
    assert_same(calm("tensor"), ran)
    assert_struck(ran)
    assert ran.told(SaveFailed)
