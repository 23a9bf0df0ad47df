"""One job, any layout: losses, gradients and weights against one process, in float64 and float32.

The step's batch is cut into five micro-batches, the last of them short; two data ranks do not come out even; the last
step of the run is short; gradients are clipped. docs/layouts.md shows this table with what it gave.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from closeranks import Hook, Session
from closeranks.core.events import StepDone
from closeranks.core.system.environment import set_world
from closeranks.core.world import World
from closeranks.data.sources.open import open_source
from closeranks.facts.layout import SCHEDULES, Layout
from closeranks.run.job.job import Job, load_job
from closeranks.run.layout_check import LayoutComparison, LayoutRecord, compare_records
from closeranks.run.loop import run_session
from closeranks.testing import run_world

pytestmark = pytest.mark.world

MODEL = {"name": "llama", "dim": 32, "num_layers": 6, "num_heads": 4, "num_kv_heads": 4, "ffn_dim": 64}
TABLES: dict[str, dict[str, Any]] = {
    "model": MODEL,
    "data": {"name": "text", "seq_len": 16, "max_bytes": 20_000},
    "train": {"global_batch": 9, "micro_batch": 2, "eval_samples": 11},
    "optim": {"lr": 1e-2, "clip": 0.5},
}
SAMPLES = 40  # four steps of nine and one of four
TIGHT = {"loss": 1e-9, "gradient": 1e-9, "weight": 1e-9}
ROUNDED = {"loss": 1e-5, "gradient": 1e-5}

ALONE = ["data=2", "data=3", "data=2 zero=1", "data=2 zero=2", "data=2 zero=3", "tensor=2", "tensor=4", "pipeline=2"]
PAIRS = [
    "data=2 tensor=2",
    "data=2 pipeline=2",
    "tensor=2 pipeline=2",
    "data=2 zero=1 tensor=2",
    "data=2 zero=2 pipeline=2",
    "data=2 zero=3 tensor=2",
    "data=2 zero=3 pipeline=2",
    "data=4 zero=1 shard=2",
    "data=4 zero=2 shard=2",
    "data=4 zero=3 shard=2",
]
EIGHT = [
    "data=4 zero=3 shard=2 tensor=2",
    "data=2 tensor=2 pipeline=2",
    "data=2 zero=3 tensor=2 pipeline=2",
]


def job_of(layout: Layout, precision: str, changes: dict[str, dict[str, Any]]) -> Job:
    tables = {**TABLES, "layout": asdict(layout)}
    for name, table in changes.items():
        tables[name] = {**tables.get(name, {}), **table}
    tables["train"] = {**tables["train"], "precision": precision, "epochs": SAMPLES / num_samples()}
    return load_job(None, extra=tables).value


@cache
def num_samples() -> int:
    job = load_job(None, extra={**TABLES, "train": {"steps": 1}}).value
    source = open_source(job.data, "train", job.run.seed)
    assert source is not None
    return len(source)


def record(folder: Path, text: str, precisions: tuple[str, ...], changes: dict[str, dict[str, Any]]) -> float:
    """Train in the world this process stands in; returns what the last evaluation gave."""
    torch.set_num_threads(1)
    loss = 0.0
    for precision in precisions:
        here = folder / precision
        result = run_session(
            Session.from_job(job_of(Layout.parse(text), precision, changes), here / "run", [LayoutRecord(here)])
        )
        assert result.eval is not None
        loss = result.eval.loss
    return loss


def prove(
    folder: Path,
    text: str,
    precisions: tuple[str, ...] = ("float64", "float32"),
    changes: dict[str, dict[str, Any]] | None = None,
) -> dict[str, LayoutComparison]:
    """Record the layout, and compare with one process; evaluations must agree too."""
    reference, alone = alone_with(folder.parent, precisions, changes or {})
    size = Layout.parse(text).num_ranks
    spread = run_world(record, size, folder / "spread", text, precisions, changes or {}, timeout_s=300)
    assert spread == pytest.approx([alone] * size, rel=1e-5)
    found = {name: compare_records(folder / "spread" / name, reference / name) for name in precisions}
    for name, comparison in found.items():  # with -s, the rows of docs/layouts.md
        print(text, name, *(f"{kind} {comparison.largest(kind):.1e}" for kind in ("loss", "gradient", "weight")))
    return found


RARE = {
    *("data=3", "data=2 zero=2", "tensor=4", "data=2 tensor=2", "data=2 pipeline=2", "data=2 zero=1 tensor=2"),
    *("data=2 zero=2 pipeline=2", "data=2 zero=3 tensor=2", "data=2 zero=3 pipeline=2", "data=4 zero=1 shard=2"),
    *("data=4 zero=3 shard=2 tensor=2", "data=2 tensor=2 pipeline=2", "data=4 zero=2 shard=2", "data=2"),
}
"""Told apart by one axis from a layout beside them: they run with the slow ones."""


def tiered(layout: str) -> Any:
    return pytest.param(layout, marks=[pytest.mark.slow] * (layout in RARE))


_ALONE: dict[str, tuple[Path, float]] = {}


def alone_with(place: Path, precisions: tuple[str, ...], changes: dict[str, dict[str, Any]]) -> tuple[Path, float]:
    """What one process makes of the job, recorded once for all layouts that are compared with it."""
    key = json.dumps([precisions, {name: table for name, table in changes.items() if name not in ("layout", "sync")}])
    if key not in _ALONE:
        set_world(World(launcher="testing"))
        folder = Path(tempfile.mkdtemp(prefix="alone-", dir=place))
        _ALONE[key] = folder, record(folder, "data=1", precisions, changes)
    return _ALONE[key]


def judge(found: dict[str, LayoutComparison]) -> None:
    assert found["float64"].first_exceeding(TIGHT) is None
    assert found["float32"].first_exceeding(ROUNDED) is None


@pytest.mark.parametrize("layout", [tiered(layout) for layout in (*ALONE, *PAIRS, *EIGHT)])
def test_trains_the_same_model_as_one_process(tmp_path: Path, layout: str) -> None:
    judge(prove(tmp_path, layout))


@pytest.mark.parametrize(
    "schedule", [pytest.param(name, marks=[pytest.mark.slow] * (name not in ("1f1b", "zbv"))) for name in SCHEDULES]
)
def test_every_schedule_trains_what_gpipe_trains(tmp_path: Path, schedule: str) -> None:
    """GPipe is compared with one process above; here each schedule with both."""
    found = prove(tmp_path, f"pipeline=2 schedule={schedule}", ("float64",))
    assert found["float64"].first_exceeding(TIGHT) is None
    run_world(record, 2, tmp_path / "gpipe", "pipeline=2 schedule=gpipe", ("float64",), {})
    compared = compare_records(tmp_path / "spread" / "float64", tmp_path / "gpipe" / "float64")
    assert compared.first_exceeding(TIGHT) is None


VARIED: dict[str, tuple[str, dict[str, dict[str, Any]]]] = {
    "tied over a pipeline": ("data=2 pipeline=2", {"model": {"tied": True}}),
    "tied over a V, both ends on one rank": ("pipeline=2 schedule=zbv", {"model": {"tied": True}}),
    "tied over a V, sharded": ("data=2 zero=3 pipeline=2 schedule=zbv", {"model": {"tied": True}}),
    "tied in flat shards": ("data=2 zero=1 pipeline=2", {"model": {"tied": True}}),
    "tied and split": ("tensor=2 pipeline=2", {"model": {"tied": True}}),
    "tied and sharded": ("data=2 zero=3 tensor=2", {"model": {"tied": True}}),
    "dropout, split": ("data=2 tensor=2", {"model": {"dropout": 0.3}}),
    "dropout, in stages": ("pipeline=2 schedule=zbv", {"model": {"dropout": 0.3}}),
    "dropout, sharded": ("data=2 zero=3", {"model": {"dropout": 0.3}}),
    "dropout, recomputed, everywhere": (
        "data=2 zero=3 tensor=2 pipeline=2",
        {"model": {"dropout": 0.3}, "train": {"recompute": "full"}},
    ),
    "recomputed in part, split": ("tensor=2", {"train": {"recompute": "selective"}}),
    "recomputed in a zero-bubble pipeline": ("pipeline=2 schedule=zbv", {"train": {"recompute": "selective"}}),
    "frozen blocks, sharded": (
        "data=2 zero=3",
        {"optim": {"groups": [{"pattern": "model.layers.[01].*", "frozen": True}]}},
    ),
    "frozen first stage": (
        "pipeline=2",
        {"optim": {"groups": [{"pattern": "model.[el]*", "frozen": True}]}},
    ),
    "sgd, groups, no clipping": (
        "data=2 zero=2 tensor=2",
        {"optim": {"name": "sgd", "clip": 0.0, "groups": [{"pattern": "lm_head*", "lr_scale": 0.1}]}},
    ),
    "gathered and reduced once a step": ("data=2 zero=3", {"layout": {"hold": "step"}}),
    "reduced once a step": ("data=2 zero=2", {"layout": {"hold": "step"}}),
    "gathered in every micro-batch of a pipeline": ("data=2 zero=3 pipeline=2", {"layout": {"hold": "shards"}}),
    "without overlap": ("data=2 zero=3", {"sync": {"overlap": False}}),
    "small buckets": ("data=2 zero=1", {"sync": {"bucket_mib": 0.01, "first_bucket_mib": 0.001}}),
}


SELDOM = {
    "recomputed in part, split",
    "dropout, split",
    "frozen first stage",
    "tied in flat shards",
    "tied and sharded",
    "dropout, sharded",
    "recomputed in a zero-bubble pipeline",
    "sgd, groups, no clipping",
    "reduced once a step",
    "without overlap",
    "small buckets",
    "tied over a pipeline",
    "tied over a V, both ends on one rank",
    "tied and split",
    "dropout, in stages",
    "frozen blocks, sharded",
    "gathered and reduced once a step",
}
"""Told apart by one transform from a case beside them: they run with the slow ones."""


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.slow] * (case in SELDOM)) for case in VARIED])
def test_what_else_a_job_asks_for_holds_under_layouts(tmp_path: Path, case: str) -> None:
    layout, changes = VARIED[case]
    assert prove(tmp_path, layout, ("float64",), changes)["float64"].first_exceeding(TIGHT) is None


def test_a_difference_is_found_and_named(tmp_path: Path) -> None:
    """The comparison above can fail: another clipping gives other gradients, first in the first tensor of the model."""
    set_world(World(launcher="testing"))
    record(tmp_path / "one", "data=1", ("float64",), {})
    record(tmp_path / "other", "data=1", ("float64",), {"optim": {"clip": 0.4}})
    found = compare_records(tmp_path / "one" / "float64", tmp_path / "other" / "float64")
    first = found.first_exceeding({"gradient": 1e-9})
    assert first is not None
    assert first.name == "model.embed_tokens.weight"
    assert first.relative == pytest.approx(0.25, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("layout", ["data=2 zero=3 tensor=2", "tensor=2 pipeline=2", "data=2 zero=1 pipeline=2"])
def test_half_precision_stays_close_to_one_process(tmp_path: Path, layout: str, precision: str) -> None:
    found = prove_roughly(tmp_path, layout, precision)
    assert found.first_exceeding({"loss": 3e-3}) is None


def prove_roughly(folder: Path, layout: str, precision: str) -> LayoutComparison:
    set_world(World(launcher="testing"))
    record(folder / "alone", "data=1", (precision,), {})
    run_world(record, Layout.parse(layout).num_ranks, folder / "spread", layout, (precision,), {}, timeout_s=300)
    return compare_records(folder / "spread" / precision, folder / "alone" / precision)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("data=2 zero=3 tensor=2", marks=pytest.mark.slow),
        "tensor=2 pipeline=2",
        pytest.param("data=2 zero=2 pipeline=2", marks=pytest.mark.slow),
    ],
)
def test_an_overflow_is_skipped_by_all_ranks_together(tmp_path: Path, layout: str) -> None:
    """A loss scale far too large for fp16: whichever stage or share sees it first, nobody takes the step."""
    ranks = run_world(overflow, Layout.parse(layout).num_ranks, tmp_path, layout, timeout_s=300)
    assert all(rank == ranks[0] for rank in ranks)
    taken = [was_taken for was_taken, _ in ranks[0]]
    scales = [scale for _, scale in ranks[0]]
    assert not taken[0]
    assert taken[-1]
    for before, after, was_taken in zip(scales, scales[1:], taken, strict=False):
        assert after == (before if was_taken else before / 2)


def overflow(folder: Path, text: str) -> list[tuple[bool, float]]:
    torch.set_num_threads(1)
    steps: list[tuple[bool, float]] = []

    class Note(Hook):
        def on_step(self, session: Session, step: StepDone) -> None:
            steps.append((step.taken, step.loss_scale))

    changes = {"optim": {"loss_scale": {"init": 2.0**18}}}
    run_session(Session.from_job(job_of(Layout.parse(text), "fp16", changes), folder / "run", [Note()]))
    return steps
