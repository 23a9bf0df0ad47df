from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from elastic_runs import LaneFailed, Launched, Ours, descendants, lines_of
from recovery import ROWS, judge, summarise
from recovery_lanes import Recovery, strike_torchrun
from soak_watch import sample


def recoveries(*seconds: float) -> list[Recovery]:
    return [Recovery(each, each - 0.01, 1, {"fork": each / 2}) for each in seconds]


def told(ours_s: float, rival_s: float) -> dict[str, Any]:
    ours = {row: [recoveries(ours_s, ours_s), recoveries(ours_s)] for row in ROWS}
    rivals = {kind: [[Recovery(rival_s)], [Recovery(rival_s)]] for kind in ("ddp", "fsdp2")}
    return summarise(ours, rivals)


def test_each_row_stands_beside_its_rival_of_the_same_round() -> None:
    ours = {"ddp": [recoveries(1.0, 3.0), recoveries(4.0)], "zero3": [recoveries(1.0), recoveries(1.0)]}
    rivals = {"ddp": [[Recovery(8.0)], [Recovery(4.0)]], "fsdp2": [[Recovery(5.0)], [Recovery(5.0)]]}
    figures = summarise(ours, rivals)
    assert figures["ddp"]["ratio"] == {"median": 2.5, "low": 1.75, "high": 3.25, "num": 2}
    assert figures["ddp"]["seconds"]["num"] == 3
    assert figures["ddp"]["since_noticed_s"]["median"] == 2.99
    assert figures["ddp"]["parts_s"] == {"fork": 1.5}
    assert figures["ddp"]["most_redone"] == 1
    assert figures["zero3"]["ratio"]["median"] == 5.0


def test_the_goal_is_three_times_in_every_row() -> None:
    assert judge(told(1.0, 3.0), list(ROWS))
    assert not judge(told(1.0, 2.9), list(ROWS))
    assert not judge(told(1.0, 9.0), ["ddp"]), "a part of the rows says nothing of the rest"


def test_a_lane_that_ends_early_says_why_and_leaves_nobody(tmp_path: Path) -> None:
    code = "import subprocess, sys; subprocess.Popen(['sleep', '60']); print('no luck')"
    with pytest.raises(LaneFailed, match="no luck"), Launched(["-c", code], tmp_path) as lane:
        lane.wait_for("nothing", lambda: False)
    with Launched(["-c", "import subprocess; subprocess.run(['sleep', '60'])"], tmp_path) as lane:
        lane.wait_for("a child", lambda: descendants(lane.pid))
        below = descendants(lane.pid)
    assert not any(Path(f"/proc/{pid}/exe").exists() for pid in (lane.pid, *below))


@pytest.mark.world
def test_the_processes_of_a_run_are_found(tmp_path: Path) -> None:
    with Ours(tmp_path, 2, ["train.steps=100000"]) as lane:
        lane.wait_for("a step", lambda: lane.num_done)
        assert len(lane.workers()) == 2
        found = sample(lane.pid)
    assert found is not None
    assert min(found.zygote_bytes, found.zygote_fds) > 0


def test_a_line_on_its_way_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    assert lines_of(path) == []
    path.write_text('{"a": 1}\n{"a": 2')
    assert lines_of(path) == [{"a": 1}]


@pytest.mark.world
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_the_rival_goes_on_where_it_was(tmp_path: Path, kind: str) -> None:
    """A rival that lost its state, or that never came back, would be no rival."""
    (found,) = strike_torchrun(tmp_path, kind, 1)
    assert found.total_s > 0
    assert 0 <= found.num_redone <= 3
    assert len({line["attempt"] for line in lines_of(tmp_path / "rank-0.jsonl")}) == 2
