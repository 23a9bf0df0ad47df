"""Persistent buffers of a user's module outlive a pipeline: each is saved once, and every stage gets it back."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from closeranks import Session
from closeranks.checkpoint.load.resharding_reader import open_newest
from closeranks.core.system.environment import set_world
from closeranks.core.world import World
from closeranks.facts.layout import Layout
from closeranks.run.components.model import primary_buffer_rank
from closeranks.run.hooks import Hook
from closeranks.run.job.job import load_job
from closeranks.run.layout_check import LayoutRecord, compare_records, recorded_losses
from closeranks.run.loop import run_session
from closeranks.testing import run_world

from .buffered_models import STAGES

BUFFERS = {"mark", "tables.counts"} | {
    f"blocks.{number}.norm.{name}"
    for number in range(3)
    for name in ("running_mean", "running_var", "num_batches_tracked")
}


class Spoken(Hook):
    """Which buffers this rank saves."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def on_end(self, session: Session) -> None:
        buffers = (one for one in session.engine.model.local_tensors() if one.piece.name in BUFFERS)
        self.names = [one.piece.name for one in buffers if one.is_primary]


def go(folder: Path, text: str, steps: int, resume: str = "") -> list[str]:
    """Train to ``steps``; the record is in the folder beside the run."""
    torch.set_num_threads(1)
    layout = Layout.parse(text)
    names = ("data", "zero", "shard", "tensor", "pipeline", "schedule")
    place = "tests.run.buffered_models"
    tables: dict[str, Any] = {
        "model": {"name": f"{place}:Buffered", "loss": f"{place}:loss", "stages": STAGES},
        "data": {"name": f"{place}:dataset"},
        "train": {"steps": steps, "global_batch": 8, "micro_batch": 4, "precision": "float64"},
        "optim": {"lr": 1e-2, "schedule": {"name": "constant", "warmup": 0}},
        "layout": {name: getattr(layout, name) for name in names},
        "checkpoint": {"resume": resume},
    }
    spoken = Spoken()
    run_session(Session.from_job(load_job(None, extra=tables).value, folder / "run", [LayoutRecord(folder), spoken]))
    return spoken.names


def world(folder: Path, text: str, steps: int, resume: str = "") -> list[list[str]]:
    return run_world(go, Layout.parse(text).num_ranks, folder, text, steps, resume, timeout_s=300)


SELDOM = [pytest.param(layout, marks=pytest.mark.slow) for layout in ("pipeline=2", "pipeline=2 schedule=zbv")]


@pytest.mark.world
@pytest.mark.parametrize("layout", [*SELDOM, "data=2 pipeline=2"])
def test_buffers_outlive_a_pipeline_and_come_back_in_one_process_and_in_stages(tmp_path: Path, layout: str) -> None:
    set_world(World(launcher="testing"))
    go(tmp_path / "through", "data=1", 6)
    spoken = world(tmp_path / "first", layout, 3)
    assert Counter(name for names in spoken for name in names) == Counter(BUFFERS)
    state = tmp_path / "first" / "run"
    assert open_newest(str(state)).shapes("model").keys() >= BUFFERS
    go(tmp_path / "alone", "data=1", 6, str(state))
    world(tmp_path / "again", layout, 6, str(state))
    for after in ("alone", "again"):
        assert recorded_losses(tmp_path / after) == pytest.approx(recorded_losses(tmp_path / "through")[3:], rel=1e-9)
        assert compare_records(tmp_path / after, tmp_path / "through").largest("weight") < 1e-9


def test_the_rank_of_a_units_first_stage_speaks_for_its_buffers() -> None:
    units, ranges = ("embed", "mid", "more", "embed"), [range(n, n + 1) for n in range(4)]
    around = ((0, 2), (1, 3))
    expected = {"embed.x": 0, "mid.norm.x": 1, "more.x": 0, "mark": 0, "middle.x": 0}
    assert {name: primary_buffer_rank(name, units, ranges, around) for name in expected} == expected
    turned = ((3,), (2,), (1,), (0,))
    assert primary_buffer_rank("embed.x", units, ranges, turned) == 3
    assert primary_buffer_rank("mark", units, ranges, turned) == 0
