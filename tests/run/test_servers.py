"""Runs with parameter servers: what they compute, save and say, and that a fault changes no bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from closeranks import Session
from closeranks.core.errors import ConfigError
from closeranks.core.events import Restored, RunStarted
from closeranks.testing import run_world
from tests.elastic.snapshot_files import shared_memory
from tests.run.generations import Case, assert_same, events, losses, run, run_and_die, state
from tests.run.small import net, open_session
from tests.run.trajectories import Trajectory, alone, largest_difference, relative, trajectory

pytestmark = pytest.mark.world
slow = pytest.mark.slow

FLOAT64 = {"train": {"precision": "float64"}}


@pytest.fixture
def place() -> Iterator[Path]:
    with shared_memory() as folder:
        yield folder


def servers(count: int = 1, **more: Any) -> dict[str, dict[str, Any]]:
    return {"sync": {"server": {"count": count, **more}}}


def compressed(name: str, **server: Any) -> dict[str, dict[str, Any]]:
    return {"sync": {"server": {"count": 1, **server}, "compress": {"name": name, "warmup": 1}}}


def through(place: Path, case: Case) -> Case:
    """The same run, undisturbed."""
    other = replace(case, folder=place / "through", deaths=(), generation=0, drain_at=0, regroup_at=0)
    run(other)
    return other


# What they compute


@pytest.mark.parametrize(
    ("size", "tables"),
    [
        (4, servers(2)),
        pytest.param(3, servers(1, mode="stale", bound=0, every=2), marks=slow),
        pytest.param(4, {**servers(2), "optim": {"name": "lamb"}}, marks=slow),
        pytest.param(4, {**servers(2), "optim": {"ema": 0.9}}, marks=slow),
        pytest.param(2, {**servers(1), "optim": {"name": "sgd", "momentum": 0.9}}, marks=slow),
    ],
)
def test_a_run_equals_one_process(tmp_path: Path, size: int, tables: dict[str, Any]) -> None:
    plain = {**tables, "sync": {}, **FLOAT64, "data": {"eval_fraction": 0.2}}
    expected = alone(tmp_path / "alone", plain)
    found = run_world(trajectory, size, tmp_path / "run", {**plain, **tables, **FLOAT64}, timeout_s=120)
    for rank in found:
        assert_near(rank, expected)


def assert_near(found: Trajectory, expected: Trajectory) -> None:
    assert relative(found.losses, expected.losses) < 1e-9
    assert relative(found.norms, expected.norms) < 1e-9
    assert largest_difference(found.weights, expected.weights) < 1e-9
    assert found.eval_loss == pytest.approx(expected.eval_loss, rel=1e-9)


@slow
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_compressed_pushes_learn(tmp_path: Path, mode: str) -> None:
    tables = {**compressed("int8", mode=mode, every=8), "train": {"steps": 32}, "optim": {"lr": 3e-3}}
    found = run_world(trajectory, 4, tmp_path / "run", tables, timeout_s=120)
    assert sum(found[0].losses[-4:]) / 4 < 0.8 * found[0].losses[0]


@pytest.mark.parametrize("mode", ["stale", "async"])
def test_a_run_whose_workers_do_not_wait_learns_and_tells_its_staleness(tmp_path: Path, mode: str) -> None:
    tables = {**servers(2, mode=mode, bound=1, every=8), "train": {"steps": 32}, "optim": {"lr": 3e-3}}
    found = run_world(trajectory, 4, tmp_path / "run", tables, timeout_s=120)
    for rank in found:
        assert rank.losses == found[0].losses, "all ranks agree on every step"
        assert all(torch.equal(rank.weights[name], weight) for name, weight in found[0].weights.items())
        assert all(rank.taken)
    assert sum(found[0].losses[-4:]) / 4 < 0.8 * found[0].losses[0]


# Faults


CASES = [
    ("data=3", servers(1)),
    pytest.param("data=3", compressed("topk"), marks=slow),
    pytest.param("data=3", compressed("onebit"), marks=slow),
    pytest.param("data=4", servers(2), marks=slow),
    pytest.param("data=3", servers(1, mode="stale", bound=0, every=2), marks=slow),
]


@pytest.mark.parametrize("victim", [0, -1], ids=["worker", "server"])
@pytest.mark.parametrize(("layout", "tables"), CASES)
def test_a_killed_rank_changes_no_bit(place: Path, layout: str, tables: dict[str, Any], victim: int) -> None:
    case = Case(place / "run", layout, tables=tables)
    case = replace(case, deaths=((victim % case.size, "step:4"),))
    run_and_die(case)
    run(replace(case, generation=1, deaths=()))
    (restored,) = events(case, Restored)
    assert restored.source == "memory"
    assert_same(case, through(place, case))
    if "compress" in tables["sync"]:
        kept = [one for key, one in state(case, 0).items() if key.startswith("sync/residual/")]
        assert any(one.any() for one in kept), "something was owed when the rank was killed"


@pytest.mark.parametrize("mode", ["stale", pytest.param("async", marks=slow)])
def test_a_killed_server_costs_the_steps_since_the_last_synchronization(place: Path, mode: str) -> None:
    case = Case(place / "run", "data=3", tables=servers(1, mode=mode, every=2), deaths=((2, "step:4"),))
    run_and_die(case)
    run(replace(case, generation=1, deaths=()))
    (restored,) = events(case, Restored)
    assert restored.step in (2, 4)
    assert list(losses(case)) == [1, 2, 3, 4, 5, 6]


def test_a_drained_run_ends_where_all_ranks_synchronize(place: Path) -> None:
    case = Case(place / "run", "data=3", tables=servers(1, mode="stale", bound=1, every=2), drain_at=3)
    assert {(told["reason"], told["steps"]) for told in run(case)} == {("drained", 4)}


@pytest.mark.parametrize(
    "order",
    [
        ("data=3", "data=2"),
        pytest.param(("data=2", "data=3"), marks=slow),
        pytest.param(("data=3", "data=4"), marks=slow),
    ],
)
def test_a_run_goes_on_without_servers_and_back(place: Path, order: tuple[str, str]) -> None:
    """Three ranks are two workers and a server, four are two and two, two are workers alone."""
    own = {"data=3": servers(1), "data=4": servers(2), "data=2": {"sync": {}}}
    case = Case(place / "run", order[0], tables={**own[order[0]], **FLOAT64}, drain_at=3)
    run(case)
    resumed = {**own[order[1]], **FLOAT64, "checkpoint": {"resume": "auto"}}
    run(replace(case, layout=order[1], tables=resumed, drain_at=0))
    whole = Case(place / "whole", "data=2", tables=FLOAT64)
    run(whole)
    assert list(losses(case)) == list(losses(whole))
    for step, (loss, _) in losses(case).items():
        assert loss == pytest.approx(losses(whole)[step][0], rel=1e-9)


def test_a_worker_leaves_and_one_joins(place: Path) -> None:
    """Between generations the number of workers may change; the servers stay the last ranks."""
    tables = {**servers(1, mode="stale", bound=1, every=2), **FLOAT64}
    case = Case(place / "run", "data=4", tables=tables, regroup_at=3)
    assert {told["has_regrouped"] for told in run(case)} == {True}
    run(replace(case, layout="data=3", generation=1, regroup_at=0))
    (restored,) = events(case, Restored)
    assert (restored.step, restored.source) == (4, "memory")
    assert sorted(losses(case)) == [1, 2, 3, 4, 5, 6]


# What is said, and what is refused


def test_the_first_line_says_who_is_a_server(place: Path) -> None:
    case = Case(place / "run", "data=4", steps=2, tables=servers(2, mode="stale", bound=1, every=8))
    run(case)
    (started,) = events(case, RunStarted)
    assert started.sync == "2 workers and 2 parameter servers, at most 1 step stale, synchronized every 8 steps"


def with_batch_norm(folder: Path) -> str:
    try:
        session: Session = open_session(
            folder,
            model=lambda: nn.Sequential(net(), nn.BatchNorm1d(3)),
            sync={"server": {"count": 1, "mode": "async"}},
        )
    except ConfigError as error:
        return str(error)
    session.close()
    return ""


def test_batch_norm_needs_ranks_that_wait(tmp_path: Path) -> None:
    for said in run_world(with_batch_norm, 2, tmp_path):
        assert "batch norm" in said
        assert "sync.server.mode" in said
