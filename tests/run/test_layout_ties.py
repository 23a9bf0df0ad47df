"""Weights that several stages share train as in one process, in whatever order the stages hold them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from closeranks import Session
from closeranks.core.errors import ModelError
from closeranks.core.system.environment import set_world
from closeranks.core.world import World
from closeranks.facts.layout import Layout
from closeranks.run.hooks import Hook
from closeranks.run.job.job import load_job
from closeranks.run.layout_check import LayoutRecord, compare_records
from closeranks.run.loop import run_session
from closeranks.testing import run_world
from closeranks.testing.world import WorldError
from tests.run.tied_models import Product

TIGHT = {"loss": 1e-9, "gradient": 1e-9, "weight": 1e-9}
STAGES = {"Autoencoder": ["e1", "e2", "d2", "d1"], "Loop": ["blocks.0", "blocks.1", "blocks.1", "blocks.0"]}


def record(folder: Path, name: str, text: str, train: dict[str, Any], *hooks: Hook) -> None:
    torch.set_num_threads(1)
    layout = Layout.parse(text)
    tables = {
        "run": {"timeout_s": 30},
        "model": {
            "name": f"tests.run.tied_models:{name}",
            "loss": "tests.run.tied_models:loss",
            "stages": STAGES[name],
        },
        "data": {"name": "tests.run.tied_models:dataset"},
        "train": {"steps": 3, "global_batch": 8, "micro_batch": 2, "precision": "float64", **train},
        "optim": {"lr": 1e-2, "clip": 0.5},
        "layout": asdict(layout),
    }
    run_session(Session.from_job(load_job(None, extra=tables).value, folder / "run", [LayoutRecord(folder), *hooks]))


def prove(folder: Path, name: str, text: str, train: dict[str, Any]) -> None:
    set_world(World(launcher="testing"))
    record(folder / "alone", name, "data=1", {})
    run_world(record, Layout.parse(text).num_ranks, folder / "spread", name, text, train, timeout_s=300)
    assert compare_records(folder / "spread", folder / "alone").first_exceeding(TIGHT) is None


@pytest.mark.world
@pytest.mark.parametrize(
    "text",
    [
        "pipeline=2",
        "data=2 pipeline=2",
        "data=2 zero=1 pipeline=2",
        "data=2 zero=2 pipeline=2",
        "data=2 zero=3 pipeline=2",
        "pipeline=2 schedule=interleaved-1f1b",
    ],
)
def test_ties_that_cross_stages_in_opposite_order(tmp_path: Path, text: str) -> None:
    prove(tmp_path, "Autoencoder", text, {})


@pytest.mark.world
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_module_that_two_stages_of_a_rank_run(tmp_path: Path, recompute: str) -> None:
    prove(tmp_path, "Loop", "pipeline=2 schedule=zbv", {"recompute": recompute})


class Wraps(Hook):
    """How often each block of this rank's stages was wrapped."""

    def on_start(self, session: Session) -> None:
        blocks = {part for part in session.model.modules() if isinstance(part, Product)}
        self.counts = [1 + hasattr(block.forward.__wrapped__, "__wrapped__") for block in blocks]


def wraps(folder: Path) -> list[int]:
    hook = Wraps()
    record(folder, "Loop", "pipeline=2 schedule=zbv", {"recompute": "full"}, hook)
    return hook.counts


@pytest.mark.world
def test_a_module_that_two_stages_of_a_rank_run_is_wrapped_once(tmp_path: Path) -> None:
    assert run_world(wraps, 2, tmp_path) == [[1], [1]]


@pytest.mark.world
def test_zero_3_refuses_a_module_that_two_stages_of_a_rank_run(tmp_path: Path) -> None:
    with pytest.raises(WorldError, match=r"stages 0 and 3 of one rank both hold the module of 'blocks\.0'") as told:
        run_world(record, 4, tmp_path, "Loop", "data=2 zero=3 pipeline=2 schedule=zbv", {})
    assert ModelError.__name__ in str(told.value)


def sessions_in_a_users_group(folder: Path) -> list[int]:
    """How many process groups stand after each of three sessions; ``run_world`` has formed the world's."""
    counts = []
    for number in range(3):
        record(folder / str(number), "Autoencoder", "pipeline=2", {})
        counts.append(len(dist.distributed_c10d._world.pg_map))
    dist.barrier()
    return counts


@pytest.mark.world
def test_a_session_gives_back_the_groups_it_made_in_a_users_group(tmp_path: Path) -> None:
    assert run_world(sessions_in_a_users_group, 2, tmp_path) == [[1, 1, 1]] * 2
