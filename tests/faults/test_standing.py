"""Ranks stand still, each time for another reason: the run says which rank is the cause and in which line, before it
does anything about it."""

from __future__ import annotations

from pathlib import Path

import pytest

from closeranks.core.events import Event, RankLost, Standstill
from closeranks.telemetry.run_log.recorder import read_events
from tests.cli.commands import IMPORTABLE, closeranks
from tests.faults import standing

pytestmark = [pytest.mark.world, pytest.mark.timeout(300)]
FLOOR_S = 2.0
JOB = f"""
[run]
folder = "run"
hooks = ["tests.faults.standing:LongHook"]
[model]
name = "tests.faults.standing:model"
loss = "tests.faults.standing:loss"
[data]
name = "tests.faults.standing:Samples"
shuffle = "none"
[train]
steps = 20
global_batch = 12
micro_batch = 2
[checkpoint]
every = 0
[elastic]
hang_floor_s = {FLOOR_S}
"""


def line(mark: str) -> str:
    lines = Path(standing.__file__).read_text().splitlines()
    number = next(number for number, text in enumerate(lines, 1) if text.endswith(f"# {mark}"))
    return f"standing.py:{number} in "


def stand_still(folder: Path, misdeed: str, num_ranks: int = 3) -> tuple[list[Event], str, str]:
    """The agent's events, what the run printed, and its report."""
    (folder / "job.toml").write_text(JOB)
    (folder / "misdeed").write_text(misdeed)
    done = closeranks("train", "job.toml", "-n", num_ranks, cwd=folder, env=IMPORTABLE)
    events = [event for _, event in read_events(folder / "run/metrics/agent.jsonl")]
    assert done.code == 0, done.out + done.err
    assert not (folder / "misdeed").exists(), "nothing went wrong"
    return events, done.out, (folder / "run/report.md").read_text()


def told(events: list[Event]) -> Standstill:
    """What was told first, before any rank was given up."""
    first = next(event for event in events if isinstance(event, Standstill | RankLost))
    assert isinstance(first, Standstill), "it is told before recovery begins"
    return first


@pytest.mark.parametrize(
    ("misdeed", "kind", "mark"),
    [("sleep", "asleep", "sleep"), ("stop", "stopped", ""), ("loader", "loader", "loader")],
)
def test_a_rank_that_never_comes_is_named_with_its_line(tmp_path: Path, misdeed: str, kind: str, mark: str) -> None:
    events, out, report = stand_still(tmp_path, misdeed)
    found = told(events)
    assert (found.rank, found.kind) == (1, kind), found
    assert FLOOR_S < found.seconds < FLOOR_S + 2.0, "how long all stood still when it was told"
    assert not mark or line(mark) in found.cause, found.cause
    assert [event.rank for event in events if isinstance(event, RankLost)] == [1]
    assert any("waiting for rank 1 in all_reduce float32[1]" in text for text in found.lines), found.lines
    assert any(line("usual") in text for text in found.lines), found.lines
    assert f"rank 1 {found.cause}" in out
    assert f"rank 1 {found.cause}" in report


def test_a_hook_that_takes_long_is_told_and_nobody_is_given_up(tmp_path: Path) -> None:
    events, out, _ = stand_still(tmp_path, "hook")
    found = told(events)
    assert (found.rank, found.kind) == (1, "user_code"), found
    assert line("hook") in found.cause
    assert not [event for event in events if isinstance(event, RankLost)]
    assert f"rank 1 {found.cause}" in out


@pytest.mark.parametrize(
    ("misdeed", "num_ranks", "mark"),
    [("branch", 2, ""), ("branch", 3, ""), ("shape", 3, "usual"), ("order", 3, "order")],
)
def test_collectives_that_do_not_match_are_told_with_both_lines(
    tmp_path: Path, misdeed: str, num_ranks: int, mark: str
) -> None:
    events, out, _ = stand_still(tmp_path, misdeed, num_ranks)
    found = told(events)
    assert (found.rank, found.kind) == (1, misdeed), found
    assert line("usual") in found.cause, "what the others call"
    assert line(mark) in found.cause if mark else True
    assert f"rank 1 {found.cause}" in out
