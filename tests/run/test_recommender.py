"""The recommender under the layouts of the data axis, resumed, and how near it comes to the best AUC there is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from closeranks import Session
from closeranks.core.events import StepDone
from closeranks.core.system.environment import set_world
from closeranks.core.world import World
from closeranks.run.job.job import load_job
from closeranks.run.loop import run_session
from closeranks.testing import run_world
from tests.run.saved import SECTIONS, tensors
from tests.run.small import of_kind

TABLES: dict[str, dict[str, Any]] = {
    "model": {"name": "recommender", "num_dense": 3, "features": 4, "rows": 40, "dim": 4, "bottom": [8], "top": [8]},
    "data": {"name": "clicks", "num_samples": 2000, "num_dense": 3, "features": 4, "rows": 40, "max_ids": 3},
    "train": {"steps": 5, "global_batch": 36, "micro_batch": 5, "eval_samples": 111},
    "optim": {"lr": 1e-2, "clip": 0.5},
}
Told = tuple[list[float], dict[str, float]]


def go(folder: Path, changes: dict[str, dict[str, Any]]) -> Told:
    """Losses of all steps, and the last evaluation."""
    names = dict.fromkeys((*TABLES, *changes))
    merged = {name: {**TABLES.get(name, {}), **changes.get(name, {})} for name in names}
    result = run_session(Session.from_job(load_job(None, extra=merged).value, folder))
    assert result.eval is not None
    return [done.loss for done in of_kind(folder, StepDone)], {"loss": result.eval.loss, **result.eval.metrics}


def alone(folder: Path, changes: dict[str, dict[str, Any]]) -> Told:
    set_world(World(launcher="testing"))
    torch.set_num_threads(1)
    return go(folder, changes)


@pytest.mark.world
def test_layouts_of_the_data_axis_equal_one_process(tmp_path: Path) -> None:
    """Micro-batches of five, the last of one sample; tables whose rows do not divide evenly by the ranks."""
    exact = {"precision": "float64"}
    losses, evaluated = alone(tmp_path / "one", {"train": exact})
    expected = tensors(tmp_path / "one", "model")
    assert set(evaluated) == {"loss", "auc", "best_auc", "best_loss"}
    for number, layout in enumerate(({"data": 2}, {"data": 2, "zero": 1}, {"data": 3, "zero": 3})):
        folder = tmp_path / str(number)
        results = run_world(go, layout["data"], folder, {"train": exact, "layout": layout})
        for found, told in results:
            if found:  # the rank that writes the metrics
                assert found == pytest.approx(losses, rel=1e-9)
            assert told == pytest.approx(evaluated, rel=1e-9)
        weights = tensors(folder, "model")
        assert weights.keys() == expected.keys()
        for name, weight in weights.items():
            assert ((weight - expected[name]).norm() / expected[name].norm().clamp(min=1e-30)).item() < 1e-9, name


@pytest.mark.usefixtures("alone")
def test_the_auc_of_an_evaluation_is_that_of_all_its_samples(tmp_path: Path) -> None:
    job = load_job(None, extra={**TABLES, "run": {"folder": str(tmp_path)}}).value
    with Session.from_job(job, tmp_path) as session:
        told = session.evaluate()
        source = session._built.eval_source
        assert source is not None
        batch = source.read(np.arange(111))
        session.model.eval()
        with torch.no_grad():
            scores = session.model(batch["dense"], batch["ids"])
    assert told.weight == 111
    assert told.metrics["auc"] == pytest.approx(roc_auc_score(batch["click"], scores), abs=1e-9)
    assert told.metrics["best_auc"] == pytest.approx(roc_auc_score(batch["click"], batch["probability"]), abs=1e-12)


@pytest.mark.usefixtures("alone")
def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    constant = {"optim": {"schedule": {"name": "constant", "warmup": 0}}}
    whole = go(tmp_path / "whole", {**constant, "train": {"steps": 6}})
    go(tmp_path / "half", {**constant, "train": {"steps": 3}})
    resumed = {"train": {"steps": 6}, "checkpoint": {"resume": str(tmp_path / "half")}}
    assert go(tmp_path / "rest", {**constant, **resumed})[1] == whole[1]
    for section in SECTIONS:
        left, right = tensors(tmp_path / "whole", section), tensors(tmp_path / "rest", section)
        assert left.keys() == right.keys()
        assert all(torch.equal(left[key], right[key]) for key in left), section


@pytest.mark.usefixtures("alone")
def test_it_comes_near_the_best_auc(tmp_path: Path) -> None:
    """Few ids, so that 100,000 samples show each often. With nothing learned the distance is 0.3."""
    small = {"features": 3, "rows": 30}
    told = go(
        tmp_path,
        {
            "model": {"name": "recommender", **small, "num_dense": 8, "bottom": [32], "dim": 8, "top": [32]},
            "data": {"name": "clicks", **small, "num_dense": 8, "max_ids": 1, "num_samples": 100_000},
            "train": {"steps": None, "epochs": 1.0, "global_batch": 500, "micro_batch": 500, "eval_samples": 0},
            "optim": {"lr": 2e-2, "weight_decay": 0.0, "clip": 1.0},
        },
    )[1]
    assert told["best_auc"] > 0.78
    assert told["best_auc"] - 0.025 < told["auc"] <= told["best_auc"] + 0.005
    assert told["best_loss"] < told["loss"] < told["best_loss"] + 0.025
