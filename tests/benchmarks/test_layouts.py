from __future__ import annotations

import sys
from argparse import Namespace
from dataclasses import replace
from math import nan
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from layouts import Contest, compare, compare_losses, judge
from layouts_rows import ROWS
from teams import Team, TeamError

from tests.benchmarks.scripts import run_script

ROW = replace(ROWS["zero3"], num_steps=2)


def test_ratios_are_taken_within_a_round() -> None:
    """The machine was busy in the second round; all paid for it."""
    seconds = {"fsdp2": [1.0, 9.0, 1.0], "closeranks": [0.8, 7.2, 0.8], "deepspeed": [2.0, 18.0, 2.0]}
    figures = compare(seconds, ROW)
    assert figures["ratio"]["closeranks"] == {"median": 1.25, "low": 1.25, "high": 1.25, "num": 3}
    assert figures["beside"]["closeranks"]["deepspeed"]["median"] == 2.5
    assert figures["step_ms"]["fsdp2"]["median"] == 500.0


def test_without_the_baseline_there_are_no_ratios() -> None:
    assert compare({"closeranks": [1.0]}, ROW)["ratio"] == {}


def test_losses_are_compared_by_their_size() -> None:
    assert compare_losses({"a": [5.0, 4.0], "b": [5.0004, 4.0]})["losses_agree"]
    assert not compare_losses({"a": [5.0, 4.0], "b": [5.0, 4.001]})["losses_agree"]


@pytest.mark.parametrize("losses", [{"a": [3.0]}, {"a": [3.0], "b": []}, {"a": [nan], "b": [nan]}, {}])
def test_losses_that_prove_nothing_do_not_agree(losses: dict[str, list[float]]) -> None:
    assert not compare_losses(losses)["losses_agree"]


def figures(*, fsdp2: float = 0.99, deepspeed: float | None = 1.2, agree: bool = True) -> dict[str, Any]:
    rivals = {"fsdp2": fsdp2} | ({} if deepspeed is None else {"deepspeed": deepspeed})
    beside = {"closeranks": {name: {"median": ratio} for name, ratio in rivals.items()}}
    return {"losses_agree": agree, "beside": beside}


@pytest.mark.parametrize(
    ("found", "met"),
    [
        (figures(), True),
        (figures(fsdp2=0.97), False),
        (figures(deepspeed=0.99), False),
        (figures(deepspeed=None), True),
        (figures(agree=False), False),
        ({"losses_agree": True, "beside": {}}, False),
    ],
)
def test_the_goal_is_asked_beside_every_rival_that_ran(found: dict[str, Any], met: bool) -> None:
    assert judge(found, ROW) is met


@pytest.mark.parametrize("row", ROWS.values(), ids=list(ROWS))
def test_a_row_names_its_own_contenders(row: Any) -> None:
    names = {entry.name for entry in row.entries}
    assert row.baseline in names
    assert set(row.goals) <= names
    assert all(set(rivals) <= names for rivals in row.goals.values())
    assert row.num_data_ranks * row.num_micro * row.batch >= 2


class Counting:
    """A contender that writes the log everybody writes; told to, one rank breaks in its second turn."""

    def __init__(self, folder: Path, breaks: bool) -> None:
        self.log_path, self._breaks, self._num_done = folder / "log.jsonl", breaks, 0

    def take_steps(self, num_steps: int) -> None:
        if self._breaks and self._num_done and dist.get_rank() == 1:
            raise ValueError("the second turn broke")
        if dist.get_rank() == 0:
            with self.log_path.open("a") as log:
                log.writelines(f'{{"loss": {self._num_done + step}}}\n' for step in range(num_steps))
        self._num_done += num_steps

    def close(self) -> None:
        return None


@pytest.mark.world
def test_a_team_takes_its_turns_and_gives_its_losses(tmp_path: Path) -> None:
    team = Team(2, 60.0, Counting, tmp_path, False)
    turns = [team.take(2), team.take(1)]
    assert all(turn.seconds > 0 for turn in turns)
    assert team.close() == [0.0, 1.0, 2.0]


@pytest.mark.world
def test_a_team_that_breaks_says_why(tmp_path: Path) -> None:
    team = Team(2, 60.0, Counting, tmp_path, True)
    team.take(1)
    with pytest.raises(TeamError, match="rank 1 raised: ValueError: the second turn broke"):
        team.take(1)
    assert team.close() == []


@pytest.mark.world
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) for name in ROWS])
def test_all_contenders_of_a_row_train_the_same(name: str) -> None:
    closing = run_script("layouts.py", "--row", name, "--quick")
    found = closing["figures"][name]
    missing = {entry.name for entry in ROWS[name].entries if not entry.is_installed}
    assert missing <= {"deepspeed"}
    assert found["left_out"] == dict.fromkeys(missing, "not installed")
    assert set(found["ratio"]) == {entry.name for entry in ROWS[name].entries} - missing
    assert found["losses_compared"] == 8  # three turns of three; the last step of closeranks is still open
    assert found["losses_agree"]
    assert not closing["met"]  # sizes that mean nothing meet no goal


def test_a_peer_that_is_not_installed_is_named_and_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    peers = tuple(entry for entry in ROW.entries if entry.package == "deepspeed")
    contest = Contest(replace(ROW, entries=peers), tmp_path, Namespace(repeats=1, timeout_s=1.0))
    contest.open()
    contest.take_rounds()
    assert contest.left_out == {"deepspeed": "not installed"}
    assert contest.close() == {}
