"""Whoever is compared reads the same bytes: ours and the hand-written loop, in every mode."""

from __future__ import annotations

from pathlib import Path

import pytest
from data_lane import Lane
from data_ours import Closeranks
from data_peers import BareLoop
from data_resume import resume_figures
from data_work import Work


@pytest.mark.parametrize("kind", ["tokens", "records"])
@pytest.mark.parametrize("shuffle", ["full", "blocks", "none"])
def test_all_samples_are_read_once(kind: str, shuffle: str, tmp_path: Path) -> None:
    work = Work(kind, 300, 0, shuffle, 32, str(tmp_path))
    found = []
    for contender in (Closeranks(), BareLoop()):
        lane = Lane(contender, work)
        lane.prepare()
        found.append(lane.check())
    assert found[0] == found[1]
    assert found[0]["rows"] == 300


def test_a_turn_tells_a_rate(tmp_path: Path) -> None:
    lane = Lane(Closeranks(), Work("tokens", 300, 0, "full", 32, str(tmp_path)))
    lane.prepare()
    assert lane.go(0.05)["rate"] > 0


@pytest.mark.slow
def test_resuming_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data_resume.REPEATS", 1)
    figures = resume_figures(tmp_path, [1000])
    assert figures.keys() == {"tokens 1000", "records 1000"}
    assert all(row["first_batch_s"]["median"] > 0 for row in figures.values())
