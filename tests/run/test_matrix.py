"""Any layout to any layout: what one saved, another holds exactly and goes on from, bit for bit where it is the same.

Every pair is saved under the first layout, resumed under the second, saved again at once, and trained five steps
further: all tensors of both checkpoints are equal to the last bit, and so are the losses at the same layout; elsewhere
they agree to 1e-5 in float32. Dropout, accumulation and uneven data ranks are on.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from closeranks import Hook, Session
from closeranks.checkpoint.load.resharding_reader import CheckpointReader, open_newest
from closeranks.core.pieces import Piece
from closeranks.core.system.environment import set_world
from closeranks.core.world import World
from closeranks.facts.layout import Layout
from closeranks.run.job.job import load_job
from closeranks.run.loop import run_session
from closeranks.testing import run_world
from tests.run.saved import SECTIONS

pytestmark = [pytest.mark.world, pytest.mark.timeout(300)]

LAYOUTS = (
    "data=1",
    "data=3",
    "data=3 zero=1",
    "data=4 zero=2 shard=2",
    "data=3 zero=3",
    "tensor=2 pipeline=2",
    "pipeline=2 schedule=zbv",
    "data=2 zero=3 tensor=2 pipeline=2",
)
FAST = {
    ("data=1", "data=2 zero=3 tensor=2 pipeline=2"),
    ("data=3", "data=3"),
    ("data=3 zero=1", "data=4 zero=2 shard=2"),
    ("data=4 zero=2 shard=2", "data=1"),
    ("data=3 zero=3", "data=3 zero=3"),
    ("tensor=2 pipeline=2", "data=3 zero=1"),
    ("pipeline=2 schedule=zbv", "data=3 zero=3"),
    ("data=2 zero=3 tensor=2 pipeline=2", "tensor=2 pipeline=2"),
}
FIRST, ALL = 3, 8
TABLES: dict[str, dict[str, Any]] = {
    "model": {
        "name": "llama",
        "dim": 32,
        "num_layers": 4,
        "num_heads": 4,
        "num_kv_heads": 2,
        "ffn_dim": 64,
        "dropout": 0.1,
    },
    "data": {"name": "text", "seq_len": 16, "max_bytes": 20_000},
    "train": {"global_batch": 7, "micro_batch": 1, "eval_samples": 1, "precision": "float32"},
    "optim": {"lr": 1e-2, "schedule": {"name": "constant", "warmup": 0}},
    "run": {"deterministic": True},
}


class Follow(Hook):
    """Saves a resumed run at once, and keeps its losses."""

    def __init__(self, again: Path) -> None:
        self._again = again
        self.losses: list[float] = []

    def on_start(self, session: Session) -> None:
        if session.num_done:
            session.save(self._again)

    def on_step(self, session: Session, step: Any) -> None:
        self.losses.append(step.loss)


def go(folder: Path, layout: str, steps: int, resume: str) -> list[float]:
    torch.set_num_threads(1)
    tables = {
        **TABLES,
        "train": {**TABLES["train"], "steps": steps},
        "layout": asdict(Layout.parse(layout)),
        "checkpoint": {"resume": resume, "every": 0},
    }
    follow = Follow(folder / "again")
    run_session(Session.from_job(load_job(None, extra=tables).value, folder / "run", [follow]))
    return follow.losses


def train(folder: Path, layout: str, steps: int, resume: str = "") -> list[float]:
    losses: list[list[float]] = run_world(
        go, Layout.parse(layout).num_ranks, folder, layout, steps, resume, timeout_s=200
    )
    assert all(one == losses[0] for one in losses), "all ranks report the same losses"
    return losses[0]


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs that several pairs begin with, each made once."""
    root = tmp_path_factory.mktemp("matrix")

    class Shelf:
        @cache  # noqa: B019 (lives as long as the module's tests)
        def started(self, layout: str) -> Path:
            place = root / f"first {layout}"
            train(place, layout, FIRST)
            return place / "run"

        @cache  # noqa: B019
        def through(self, layout: str) -> list[float]:
            return train(root / f"through {layout}", layout, ALL)

    set_world(World(launcher="testing"))
    return Shelf()


PAIRS = [
    pytest.param(before, after, marks=() if (before, after) in FAST else pytest.mark.slow)
    for before in LAYOUTS
    for after in LAYOUTS
]


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_any_layout_goes_on_from_any_other(shelf: Any, tmp_path: Path, before: str, after: str) -> None:
    started = shelf.started(before)
    losses = train(tmp_path, after, ALL, str(started))
    same = compared(open_newest(str(started)), open_newest(str(tmp_path / "again")))
    assert same > 3 * 30, "weights and both moments of a model with 30 and more parameters"
    if before == after:
        assert losses == shelf.through(before)[FIRST:], "bit for bit"
    else:
        assert losses == pytest.approx(shelf.through("data=1")[FIRST:], rel=1e-5)


def compared(ours: CheckpointReader, theirs: CheckpointReader) -> int:
    """How many tensors two checkpoints have, all of them equal, in their digests too."""
    assert ours.manifest.digests() == theirs.manifest.digests(), "whatever layout saved them"
    num_tensors = 0
    for section in SECTIONS:
        assert ours.shapes(section) == theirs.shapes(section)
        for key, shape in ours.shapes(section).items():
            whole = Piece.whole(key, shape)
            assert torch.equal(ours.read(section, key, whole), theirs.read(section, key, whole)), key
            num_tensors += 1
    return num_tensors


def test_the_matrix_is_whole_and_its_fast_pairs_touch_every_layout() -> None:
    assert len(PAIRS) == 64
    assert len(FAST) == 8
    assert {before for before, _ in FAST} == set(LAYOUTS)
    assert {(before, after) for before in LAYOUTS for after in LAYOUTS} >= FAST


def test_digests_differ_where_a_run_went_on(shelf: Any, tmp_path: Path) -> None:
    """The control of the comparison above: a step later nothing is equal any more."""
    started = shelf.started("data=1")
    train(tmp_path, "data=1", FIRST + 1, str(started))
    ours, theirs = (open_newest(str(place)).manifest.digests() for place in (started, tmp_path / "run"))
    assert ours.keys() == theirs.keys()
    assert not any(ours[name] == theirs[name] for name in ours if name[0] == "model")
