"""What counts as a difference between two runs: rounding around zero does not, a missing reduction does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from closeranks import Session
from closeranks.cli.layout_check import TOLERANCES
from closeranks.core.system.environment import set_world
from closeranks.core.world import World
from closeranks.run.job.job import load_job
from closeranks.run.layout_check import LayoutRecord, compare_records, relative_difference
from closeranks.run.loop import run_session
from closeranks.testing import run_world

SPLIT = [{"pattern": f"blocks.*.{name}.weight", "dim": 0} for name in "qkv"]
SPLIT += [{"pattern": "blocks.*.o.weight", "dim": 1}]
WHOLE = [*SPLIT, {"pattern": "blocks.*.scale", "partial": True}]


def record(folder: Path, tensor: int, table: list[dict[str, Any]], precisions: tuple[str, ...]) -> None:
    torch.set_num_threads(1)
    for precision in precisions:
        tables = {
            "model": {
                "name": "tests.run.own_models:Attentive",
                "loss": "tests.run.own_models:loss",
                "tensor": table,
            },
            "data": {"name": "tests.run.own_models:dataset"},
            "train": {"steps": 3, "global_batch": 9, "micro_batch": 3, "precision": precision},
            "optim": {"lr": 1e-2},
            "layout": {"tensor": tensor},
        }
        own = folder / precision
        run_session(Session.from_job(load_job(None, extra=tables).value, own / "run", [LayoutRecord(own)]))


def prove(folder: Path, table: list[dict[str, Any]], precisions: tuple[str, ...]) -> dict[str, Any]:
    set_world(World(launcher="testing"))
    record(folder / "alone", 1, table, precisions)
    run_world(record, 2, folder / "spread", 2, table, precisions, timeout_s=300)
    sides = {name: (folder / "spread" / name, folder / "alone" / name) for name in precisions}
    return {name: compare_records(*both).first_exceeding(TOLERANCES[name]) for name, both in sides.items()}


@pytest.mark.world
def test_a_gradient_that_is_zero_by_mathematics_differs_by_nothing(tmp_path: Path) -> None:
    """A bias on keys moves all scores of a query alike, and softmax does not see it."""
    assert prove(tmp_path, WHOLE, ("float64", "float32")) == {"float64": None, "float32": None}


@pytest.mark.world
def test_a_missing_reduction_is_found_beside_it(tmp_path: Path) -> None:
    """The scale works on split heads, and its gradients are not summed over the ranks."""
    found = prove(tmp_path, SPLIT, ("float64", "float32"))
    assert None not in found.values()
    compared = compare_records(tmp_path / "spread" / "float64", tmp_path / "alone" / "float64")
    wrong = [one.name for one in compared.differences if one.kind == "gradient" and one.relative > 1e-9]
    assert set(wrong) == {"blocks.0.scale", "blocks.1.scale"}


def test_a_difference_is_measured_by_its_tensor_or_a_floor() -> None:
    one, noise = torch.tensor([3.0, 4.0]), torch.tensor([3e-17, 0.0])
    assert relative_difference(one * 1.1, one) == pytest.approx(0.1)
    assert relative_difference(noise, -noise) == pytest.approx(2.0)
    assert relative_difference(noise, -noise, floor=1e-2) < 1e-14
    assert relative_difference(one * 1.1, one, floor=1e-2) == pytest.approx(0.1)
    assert relative_difference(torch.zeros(2), torch.zeros(2)) == 0.0
    assert relative_difference(one, torch.tensor([3.0, float("nan")]), floor=1.0) == float("inf")
