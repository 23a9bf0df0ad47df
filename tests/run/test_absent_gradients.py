"""Parameters that no sample of a step used: left alone as torch leaves them, whatever the layout."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from closeranks import Session
from closeranks.checkpoint.load.resharding_reader import open_newest
from closeranks.core.events import Warned
from closeranks.core.pieces import Piece
from closeranks.core.system.environment import set_world
from closeranks.core.world import World
from closeranks.facts.layout import Layout
from closeranks.run.job.job import load_job
from closeranks.run.loop import run_session
from closeranks.telemetry.reports.report import write_report
from closeranks.testing import run_world
from tests.run.branching_models import STEPS, Branching, tables, torch_alone
from tests.run.small import of_kind

ADAMW, SGD = {"name": "adamw"}, {"name": "sgd", "momentum": 0.9}
LAMB, LARS = {"name": "lamb"}, {"name": "lars", "trust": 0.5}
Values = dict[str, torch.Tensor]


def go(folder: Path, text: str, rule: dict[str, Any], steps: int = STEPS, resume: str = "", **more: Any) -> None:
    torch.set_num_threads(1)
    layout = {**asdict(Layout.parse(text)), **more.pop("layout", {})}
    keys = tables(rule, steps, layout=layout, checkpoint={"resume": resume}, run={"deterministic": True}, **more)
    run_session(Session.from_job(load_job(None, extra=keys).value, folder / "run"))


def go_alone(folder: Path, rule: dict[str, Any], steps: int = STEPS, resume: str = "", **more: Any) -> None:
    set_world(World(launcher="testing"))
    go(folder, "data=1", rule, steps, resume, **more)


def spread(folder: Path, text: str, *args: Any) -> None:
    run_world(go, Layout.parse(text).num_ranks, folder, text, *args, timeout_s=300)


def saved(folder: Path) -> tuple[Values, Values]:
    """Weights, and what the optimizer remembers, by names."""
    reader = open_newest(str(folder / "run" / "checkpoints"))

    def read(section: str) -> Values:
        shapes = reader.shapes(section)
        return {name: reader.read(section, name, Piece.whole(name, shape)) for name, shape in shapes.items()}

    return read("model"), read("optimizer")


def assert_like_torch(folder: Path, rule: str, tolerance: float = 1e-9) -> None:
    weights, memory, absent = torch_alone(rule)
    conditional = {name for names in absent for name in names if "never" not in name}
    assert any(conditional - names for names in absent), "a branch is taken in some steps"
    assert conditional, "and in some it is not"
    ours, remembered = saved(folder)
    for name, weight in weights.items():
        torch.testing.assert_close(ours[name], weight, rtol=tolerance, atol=tolerance)
        for key, value in memory[name].items():
            found = remembered[f"{name}/{key}"]
            if key == "step":
                assert found == value, name
            elif value is not None:
                torch.testing.assert_close(found, value, rtol=tolerance, atol=tolerance)
    start = dict(Branching().double().named_parameters())
    for name in ("blocks.0.never", "blocks.1.never"):
        assert torch.equal(ours[name], start[name].detach()), "not a bit of it has moved"


@pytest.mark.parametrize("rule", [ADAMW, SGD], ids=lambda rule: rule["name"])
def test_one_process_leaves_them_as_torch_does(tmp_path: Path, rule: dict[str, Any]) -> None:
    go_alone(tmp_path, rule)
    assert_like_torch(tmp_path, rule["name"], 1e-12)
    told = [event.what for event in of_kind(tmp_path / "run", Warned) if "gradient" in event.what]
    assert len(told) == 1
    assert told[0].startswith("no gradient reached 'blocks.0.never' and 'blocks.1.never' in 5 steps")
    assert told[0] in write_report(tmp_path / "run").read_text()


CASES = [
    ("data=2", ADAMW, {}),
    ("data=3", SGD, {}),
    ("data=3 zero=1", ADAMW, {}),
    ("data=2 zero=2", SGD, {"hold": "shards"}),
    ("data=2 zero=2", ADAMW, {"hold": "step"}),
    ("data=2 zero=3", ADAMW, {"hold": "shards"}),
    ("data=3 zero=3", SGD, {"hold": "step"}),
    ("data=4 zero=3 shard=2", ADAMW, {}),
    ("tensor=2", ADAMW, {}),
    ("pipeline=2", ADAMW, {}),
    ("pipeline=2 schedule=zbv", SGD, {}),
    ("data=2 zero=1 tensor=2", SGD, {}),
    ("data=2 zero=3 pipeline=2", ADAMW, {}),
]
QUICK = {("data=3 zero=1", "adamw"), ("data=2 zero=3", "adamw"), ("tensor=2", "adamw"), ("pipeline=2", "adamw")}


def tiered(case: tuple[str, dict[str, Any], dict[str, Any]]) -> Any:
    text, rule, more = case
    name = "-".join([text, rule["name"], *more.values()])
    return pytest.param(*case, marks=[pytest.mark.slow] * ((text, rule["name"]) not in QUICK), id=name)


@pytest.mark.world
@pytest.mark.parametrize(("text", "rule", "more"), [tiered(case) for case in CASES])
def test_several_ranks_agree_on_what_to_leave(
    tmp_path: Path, text: str, rule: dict[str, Any], more: dict[str, Any]
) -> None:
    """A parameter that one rank had no gradient for, and another had, is updated on all of them."""
    run_world(go_with, Layout.parse(text).num_ranks, tmp_path, text, rule, {"layout": more}, timeout_s=300)
    assert_like_torch(tmp_path, rule["name"])


def go_with(folder: Path, text: str, rule: dict[str, Any], more: dict[str, Any]) -> None:
    go(folder, text, rule, **more)


LAYERWISE = [("data=2 zero=1", LAMB), ("data=3", LARS), ("data=2 zero=3", LARS), ("tensor=2", LAMB)]


@pytest.mark.world
@pytest.mark.slow
@pytest.mark.parametrize(("text", "rule"), LAYERWISE)
def test_layerwise_rules_on_several_ranks_as_on_one(tmp_path: Path, text: str, rule: dict[str, Any]) -> None:
    go_alone(tmp_path / "alone", rule)
    spread(tmp_path / "spread", text, rule)
    for ours, theirs in zip(saved(tmp_path / "spread"), saved(tmp_path / "alone"), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.world
@pytest.mark.parametrize(
    ("rule", "first", "second"),
    [
        pytest.param(LAMB, "data=2 zero=1", "data=1"),
        pytest.param(ADAMW, "data=1", "data=2 zero=3", marks=pytest.mark.slow),
    ],
)
def test_step_counts_of_their_own_survive_another_layout(
    tmp_path: Path, rule: dict[str, Any], first: str, second: str
) -> None:
    go_alone(tmp_path / "through", rule)
    spread(tmp_path / "first", first, rule, 4)
    spread(tmp_path / "second", second, rule, STEPS, str(tmp_path / "first" / "run"))
    for ours, theirs in zip(saved(tmp_path / "second"), saved(tmp_path / "through"), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    counts = {value.item() for key, value in saved(tmp_path / "second")[1].items() if key.endswith("/step")}
    assert len(counts) > 2, "never, sometimes, always"
    told = [event for event in of_kind(tmp_path / "second" / "run", Warned) if "gradient" in event.what]
    assert [event.step for event in told] == [5]


@pytest.mark.world
@pytest.mark.slow
def test_replicas_that_train_apart_leave_what_none_of_them_used(tmp_path: Path) -> None:
    more = {"sync": {"local": {"every": 3}}}
    run_world(go_with, 2, tmp_path, "data=2", ADAMW, more, timeout_s=300)
    weights, start = saved(tmp_path)[0], dict(Branching().double().named_parameters())
    assert torch.equal(weights["blocks.0.never"], start["blocks.0.never"].detach())
    assert not torch.equal(weights["blocks.0.up.weight"], start["blocks.0.up.weight"].detach())
