"""A module of the user's own under every axis: what they write beside it is a list of stages and a table of names."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from closeranks import Session
from closeranks.core.errors import ConfigError, ModelError
from closeranks.core.events import Warned
from closeranks.core.system.environment import detect_world, set_world
from closeranks.core.world import World
from closeranks.facts.layout import Layout
from closeranks.run.job.job import check_workers, load_job
from closeranks.run.layout_check import LayoutRecord, compare_records
from closeranks.run.loop import run_session
from closeranks.testing import run_world
from closeranks.testing.world import WorldError
from tests.run.small import of_kind

STAGES = ["embed", "blocks.*", "head"]
TABLE = [
    {"pattern": "embed.weight", "dim": 0},
    {"pattern": "blocks.*.up.weight", "dim": 0},
    {"pattern": "blocks.*.down.weight", "dim": 1},
    {"pattern": "head.weight", "dim": 0, "whole": True},
]
TIGHT = {"loss": 1e-9, "gradient": 1e-9, "weight": 1e-9}


def tables_of(text: str, model: dict[str, Any]) -> dict[str, Any]:
    layout = Layout.parse(text)
    return {
        "model": {"name": "tests.run.own_models:Net", "loss": "tests.run.own_models:loss", **model},
        "data": {"name": "tests.run.own_models:dataset"},
        "train": {"steps": 5, "global_batch": 9, "micro_batch": 2, "precision": "float64"},
        "optim": {"lr": 1e-2, "clip": 0.5},
        "layout": asdict(layout),
    }


def record(folder: Path, text: str, model: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    job = load_job(None, extra=tables_of(text, model)).value
    run_session(Session.from_job(job, folder / "run", [LayoutRecord(folder)]))


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "sharded, nothing beside it": ("data=2 zero=3", {}),
    "flat shards, nothing beside it": ("data=3 zero=2", {}),
    "stages": ("pipeline=2", {"stages": STAGES}),
    "stages with dropout": ("data=2 pipeline=2", {"stages": STAGES, "args": {"dropout": 0.3}}),
    "stages of a V": ("pipeline=2 schedule=zbv", {"stages": STAGES}),
    "a table": ("tensor=2", {"tensor": TABLE}),
    "a table, sharded": ("data=2 zero=3 tensor=2", {"tensor": TABLE}),
    "both": ("tensor=2 pipeline=2", {"stages": STAGES, "tensor": TABLE}),
    "both, zero bubble": ("tensor=2 pipeline=2 schedule=zbv", {"stages": STAGES, "tensor": TABLE}),
}


SELDOM = {"flat shards, nothing beside it", "stages", "stages of a V", "a table", "both"}


@pytest.mark.world
@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.slow] * (case in SELDOM)) for case in CASES])
def test_trains_the_same_model_as_one_process(tmp_path: Path, case: str) -> None:
    text, model = CASES[case]
    set_world(World(launcher="testing"))
    record(tmp_path / "alone", "data=1", model)
    run_world(record, Layout.parse(text).num_ranks, tmp_path / "spread", text, model, timeout_s=300)
    assert compare_records(tmp_path / "spread", tmp_path / "alone").first_exceeding(TIGHT) is None


WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "a dim that does not divide": (
        "tensor=2",
        {"tensor": TABLE, "args": {"hidden": 21}},
        r"blocks\.0\.up\.weight.*\(?21, 12\)?",
    ),
    "a dim that is not there": (
        "tensor=2",
        {"tensor": [{"pattern": "blocks.*.up.weight", "dim": 2}]},
        r"blocks\.0\.up\.weight.*\(?20, 12\)?",
    ),
    "a name that is not there": ("tensor=2", {"tensor": [{"pattern": "blocks.*.upp.weight", "dim": 0}]}, r"upp"),
    "a parameter in no stage": (
        "pipeline=2",
        {"name": "tests.run.own_models:broken_stage", "stages": STAGES},
        r"parameter 'extra' \[3\] is in none of the modules",
    ),
    "a stage that is not there": ("pipeline=2", {"stages": ["embed", "block.*", "head"]}, r"block\.\*"),
}


@pytest.mark.world
@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_table_is_refused_with_names_and_shapes(tmp_path: Path, case: str) -> None:
    text, model, sentence = WRONG[case]
    with pytest.raises(WorldError, match=sentence) as told:
        run_world(record, 2, tmp_path, text, model)
    assert ModelError.__name__ in str(told.value)


@pytest.mark.parametrize(("text", "place"), [("tensor=2", "layout.tensor"), ("pipeline=2", "layout.pipeline")])
def test_an_axis_that_the_model_says_nothing_about_is_refused_before_anything_starts(text: str, place: str) -> None:
    problems = check_workers(load_job(None, extra=tables_of(text, {})).value, 2)
    assert [problem.place for problem in problems] == [place]
    assert problems[0].fix.endswith("The nearest legal layout is data=2.")


def test_an_entry_of_the_table_says_one_thing() -> None:
    with pytest.raises(ConfigError, match="either a dim, or partial"):
        load_job(None, extra=tables_of("tensor=2", {"tensor": [{"pattern": "x"}]}))


@pytest.mark.world
def test_python_hands_stages_and_table_over_beside_the_model(tmp_path: Path) -> None:
    losses = run_world(train_in_python, 4, tmp_path)
    set_world(World(launcher="testing"))
    assert losses == pytest.approx([train_in_python(tmp_path / "alone", 1, 1)] * 4, rel=1e-9)


def train_in_python(folder: Path, tensor: int = 2, pipeline: int = 2) -> float:
    from closeranks import train
    from tests.run.own_models import Net, dataset, loss

    result = train(
        Net,
        dataset(),
        loss,
        stages=STAGES,
        tensor=TABLE,
        train={"steps": 3, "global_batch": 4, "micro_batch": 1, "precision": "float64"},
        layout={"tensor": tensor, "pipeline": pipeline},
        run={"folder": str(folder / "python")},
    )
    return result.loss


def warned_on_two_hosts(folder: Path, hosts: tuple[int, ...]) -> list[str]:
    world = replace(detect_world(), hosts=hosts)
    set_world(world)
    record(folder, "tensor=2", {"tensor": TABLE})
    return [event.what for event in of_kind(folder / "run", Warned)] if world.is_lead else []


@pytest.mark.world
@pytest.mark.parametrize("hosts", [(0, 1), (0, 0)])
def test_a_tensor_axis_across_hosts_is_warned_of_as_a_run_starts(tmp_path: Path, hosts: tuple[int, ...]) -> None:
    told, _ = run_world(warned_on_two_hosts, 2, tmp_path, hosts)
    crossing = [what for what in told if "the tensor axis crosses hosts: 2 ranks" in what]
    assert len(crossing) == len(set(hosts)) - 1
