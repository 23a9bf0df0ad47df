"""What is planned against what is measured: traffic to the byte, memory within a tenth or so."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from closeranks.facts.mesh import Mesh
from closeranks.plan.layouts import RankCost, layout_cost
from closeranks.run.job.describe import describe_job
from closeranks.run.job.job import layout_for, load_job
from closeranks.testing import run_world
from tests.cli.commands import TINY
from tests.plan.measured import Counts, step_counts, step_peak

# The table of run/test_layout_bytes.py is the daily one; these are further layouts, and peaks of memory.
pytestmark = [pytest.mark.world, pytest.mark.slow]

SMALL = ["model.num_layers=4", "data.seq_len=32", "train.global_batch=8", "train.micro_batch=1"]
FUSED = ["train.precision=bf16", "model.attention=flash"]


def planned(overrides: list[str], num_ranks: int) -> list[RankCost]:
    """Of every rank."""
    job = load_job(Path(TINY), overrides).value
    layout = layout_for(job, num_ranks)
    cost = layout_cost(describe_job(job), layout)
    return [cost.ranks[Mesh(layout).coordinate(rank).pipeline] for rank in range(num_ranks)]


def counts(rank: RankCost) -> Counts:
    calls, sizes = Counter[str](), Counter[str]()
    for row in rank.volumes:
        calls[row.operation] += row.calls
        sizes[row.operation] += row.payload_bytes
    return {name: (calls[name], sizes[name]) for name in calls}


@pytest.mark.parametrize(
    ("num_ranks", "changes"),
    [
        (2, []),
        (2, ["layout.zero=1"]),
        (2, ["layout.zero=2"]),
        (2, ["layout.zero=3"]),
        (2, ["layout.zero=3", "layout.hold=step", *FUSED]),
        (2, ["layout.tensor=2"]),
        (2, ["layout.tensor=2", "train.recompute=full", *FUSED]),
        (2, ["layout.pipeline=2", "model.tied=true"]),
        (2, ["layout.pipeline=2", "layout.schedule=zbv", "model.tied=true"]),
        (4, ["layout.zero=3", "layout.shard=2"]),
        (4, ["layout.zero=2", "layout.tensor=2"]),
        (4, ["layout.tensor=2", "layout.pipeline=2", "model.tied=true"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_every_rank_sends_what_was_planned(tmp_path: Path, num_ranks: int, changes: list[str]) -> None:
    overrides = [*SMALL, *changes]
    measured = run_world(step_counts, num_ranks, TINY, overrides, str(tmp_path / "run"))
    assert measured == [counts(rank) for rank in planned(overrides, num_ranks)]


@pytest.mark.parametrize(
    ("num_ranks", "changes"),
    [
        (1, []),
        (1, FUSED),
        (1, ["train.recompute=selective"]),
        (2, []),
        (2, ["layout.zero=1"]),
        (2, ["layout.zero=2"]),
        (2, ["layout.zero=3"]),
        (2, ["layout.tensor=2"]),
        (2, ["layout.pipeline=2"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_no_rank_holds_much_else_than_was_planned(tmp_path: Path, num_ranks: int, changes: list[str]) -> None:
    """Of tensors that live; what an allocator or a kernel takes beside them is not seen here. bf16 takes minutes on a
    CPU without its instructions."""
    overrides = ["train.global_batch=16", "train.micro_batch=2", *changes]
    measured = run_world(step_peak, num_ranks, TINY, overrides, str(tmp_path / "run"), timeout_s=380)
    for peak, rank in zip(measured, planned(overrides, num_ranks), strict=True):
        assert rank.total_bytes == pytest.approx(peak, rel=0.12)
