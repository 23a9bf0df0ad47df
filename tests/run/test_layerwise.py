"""LARS and LAMB under every way of cutting a model: the same weights as in one process, and resumed bit for bit."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from closeranks import Session
from closeranks.facts.layout import Layout
from closeranks.run.job.job import load_job
from closeranks.run.layout_check import LayoutRecord, compare_records, recorded_losses
from closeranks.run.loop import run_session
from closeranks.testing import run_world
from tests.run.test_layouts import MODEL, TABLES, TIGHT, prove

pytestmark = pytest.mark.world

RULES: dict[str, dict[str, Any]] = {
    "lars": {"name": "lars", "lr": 2.0, "trust": 0.02, "weight_decay": 0.1},
    "lamb": {"name": "lamb", "lr": 1e-2, "weight_decay": 0.1},
}
LAYOUTS = ["data=2", "data=2 zero=1", "data=2 zero=2", "data=2 zero=3", "tensor=2", "pipeline=2"]
QUICK = {("lamb", "data=2 zero=1"), ("lars", "data=2 zero=3"), ("lamb", "tensor=2")}


def tiered(rule: str, layout: str) -> Any:
    return pytest.param(rule, layout, marks=[pytest.mark.slow] * ((rule, layout) not in QUICK))


TIED = {"model": {**MODEL, "tied": True}}
CASES = [tiered(rule, layout) for rule in RULES for layout in LAYOUTS]
CASES += [tiered("lamb", "data=2 zero=1 tensor=2"), tiered("lars", "data=4 zero=3 shard=2")]
CASES += [tiered("lamb", "data=2 zero=2 pipeline=2"), tiered("lars", "tensor=2 pipeline=2")]


@pytest.mark.parametrize(("rule", "layout"), CASES)
def test_learns_as_one_process_does(tmp_path: Path, rule: str, layout: str) -> None:
    found = prove(tmp_path, layout, ("float64",), {"optim": RULES[rule]})["float64"]
    assert found.first_exceeding(TIGHT) is None


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["pipeline=2", "data=2 zero=3 pipeline=2"])
def test_a_tied_parameter_counts_once(tmp_path: Path, layout: str) -> None:
    found = prove(tmp_path, layout, ("float64",), {"optim": RULES["lamb"], **TIED})["float64"]
    assert found.first_exceeding(TIGHT) is None


def go(folder: Path, text: str, rule: str, steps: int, resume: str = "") -> None:
    torch.set_num_threads(1)
    tables = {
        **TABLES,
        "model": {**MODEL, "num_layers": 2},
        "train": {**TABLES["train"], "steps": steps},
        "optim": {**RULES[rule], "schedule": {"name": "constant", "warmup": 0}},
        "layout": asdict(Layout.parse(text)),
        "checkpoint": {"resume": resume},
        "run": {"deterministic": True},
    }
    run_session(Session.from_job(load_job(None, extra=tables).value, folder / "run", [LayoutRecord(folder)]))


@pytest.mark.parametrize(
    ("rule", "layout"), [tiered("lamb", "data=2 zero=1"), tiered("lars", "data=2"), tiered("lamb", "data=2 zero=3")]
)
def test_a_resumed_run_is_bit_identical(tmp_path: Path, rule: str, layout: str) -> None:
    def world(name: str, steps: int, resume: str = "") -> None:
        run_world(go, 2, tmp_path / name, layout, rule, steps, resume, timeout_s=300)

    world("through", 4)
    world("first", 2)
    world("second", 4, str(tmp_path / "first" / "run"))
    assert recorded_losses(tmp_path / "second") == recorded_losses(tmp_path / "through")[2:]
    assert compare_records(tmp_path / "second", tmp_path / "through").largest("weight") == 0.0
