"""Runs whose replicas train apart: what they say and save, and that they go on as if nothing had happened."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from closeranks import Hook, Session
from closeranks.core.errors import ConfigError, UserError
from closeranks.core.events import Evaluated, Restored, RunStarted, SharesChanged, StepDone
from closeranks.run.job.job import check_workers, load_job
from closeranks.run.job.resize import resize_job
from closeranks.run.loop import run_session
from closeranks.testing import run_world
from tests.elastic.snapshot_files import shared_memory
from tests.run import buffered_models
from tests.run.generations import Case, assert_same, events, losses, run, run_and_die, state, tables_of
from tests.run.saved import tensors, tree, write
from tests.run.small import of_kind, open_session
from tests.run.traffic import Traffic
from tests.sync.apart import job_of

slow = pytest.mark.slow
world = pytest.mark.world


@pytest.fixture
def place() -> Iterator[Path]:
    with shared_memory() as folder:
        yield folder


def local(every: int = 2, **more: Any) -> dict[str, dict[str, Any]]:
    return {"sync": {"local": {"every": every, **more}}}


STREAMING = local(4, fragments=2)
CASES = [
    ("data=2", STREAMING),
    pytest.param("data=3", STREAMING, marks=slow),  # where the order in which replicas are added up matters
    pytest.param("data=2", local(), marks=slow),
    pytest.param("data=4", local(2, replicas=2), marks=slow),
    pytest.param("data=2", {**local(), "train": {"precision": "fp16"}}, marks=slow),
    pytest.param("data=4 zero=1", local(4, fragments=2, replicas=2), marks=slow),
    pytest.param("data=4 zero=3", local(4, fragments=2, replicas=2), marks=slow),
    pytest.param("data=4 zero=3 shard=2", local(), marks=slow),
    pytest.param("data=2 tensor=2", STREAMING, marks=slow),
    pytest.param("data=2 pipeline=2", STREAMING, marks=slow),
]


def through(place: Path, case: Case) -> Case:
    """The same run, undisturbed."""
    other = replace(case, folder=place / "through", deaths=(), generation=0, hosts=(), drain_at=0, regroup_at=0)
    run(other)
    return other


# What travels


def crossings(layout: str, tables: dict[str, Any], folder: Path) -> list[set[tuple[int, ...]]]:
    """Of each step, the groups of ranks that it communicated with."""
    job = job_of(layout, tables["sync"]["local"], checkpoint={"save": False})
    found: list[set[tuple[int, ...]]] = []
    with Session.from_job(job, folder) as session, Traffic() as traffic:
        for step in session:
            found.append({kind.ranks for kind in traffic.calls})
            traffic.calls.clear()
            step.run()
        found.append({kind.ranks for kind in traffic.calls})
    return found[1:]


@world
@pytest.mark.parametrize("layout", ["data=4", pytest.param("data=4 zero=3", marks=slow)])
def test_between_meetings_replicas_hear_nothing_of_each_other(tmp_path: Path, layout: str) -> None:
    heard = run_world(crossings, 4, layout, local(3, replicas=2), tmp_path, timeout_s=300)
    for rank, steps in enumerate(heard):
        home = {0, 1} if rank < 2 else {2, 3}
        for number, groups in enumerate(steps, start=1):
            assert {tuple(home)} & groups, "a replica's ranks train together"
            is_meeting = number in (3, 6)
            assert any(set(group) - home for group in groups) == is_meeting, (rank, number, groups)


# Going on


@world
@pytest.mark.parametrize(("layout", "tables"), CASES)
def test_a_worker_killed_within_a_round_costs_that_round(place: Path, layout: str, tables: dict[str, Any]) -> None:
    """The copy of the meeting at step 4 (the third, with that of the start) is torn while step 5 computes."""
    case = Case(place / "run", layout, tables=tables, deaths=((1, "slot.in_data:3"),))
    run_and_die(case)
    run(replace(case, generation=1, deaths=()))
    (restored,) = events(case, Restored)
    assert restored.source == "memory"
    assert restored.step in (2, 4)
    assert_same(case, through(place, case))


@world
@pytest.mark.parametrize(("layout", "tables"), CASES)
def test_a_drained_run_goes_on_from_its_checkpoint(place: Path, layout: str, tables: dict[str, Any]) -> None:
    case = Case(place / "run", layout, tables=tables, drain_at=3)
    assert {(told["reason"], told["steps"]) for told in run(case)} == {("drained", 4)}  # asked for within a round
    resumed = {**tables, "checkpoint": {"resume": "auto"}}
    run(replace(case, tables=resumed, drain_at=0))
    assert_same(case, through(place, case))


@world
@slow
def test_what_is_lost_of_the_outer_state_would_be_seen(place: Path) -> None:
    """The control: without the outer momentum, or with the rows of replicas exchanged, a resumed run goes elsewhere."""
    case = Case(place / "run", "data=2", tables=local(), drain_at=3)
    run(case)
    found = {name: tensors(place / "run" / "run", name) for name in ("model", "optimizer", "other", "sync")}
    values, undisturbed = tree(place / "run" / "run"), through(place, replace(case, tables=local()))
    for name in ("sync", "optimizer"):
        changed = {key: tensor.flip(0) if name == "optimizer" else 0 * tensor for key, tensor in found[name].items()}
        other = replace(case, folder=place / name, drain_at=0)
        other = replace(other, tables={**local(), "checkpoint": {"resume": str(place / name / "from")}})
        write(place / name / "from", {**found, name: changed}, values, values["progress"]["step"])
        run(other)
        pairs = zip(state(other, 0).items(), state(undisturbed, 0).values(), strict=True)
        assert any(not torch.equal(left, right) for (key, left), right in pairs if key.startswith("model/")), name


@world
@pytest.mark.parametrize(
    ("layouts", "tables"),
    [
        (("data=2", "data=3"), STREAMING),
        pytest.param(("data=3", "data=2"), local(), marks=slow),
        pytest.param(("data=4 zero=3 shard=2", "data=2 zero=3 shard=2"), local(), marks=slow),
        pytest.param(("data=2 zero=3 shard=2", "data=4 zero=3 shard=2"), STREAMING, marks=slow),
        pytest.param(("data=4", "data=1"), STREAMING, marks=slow),
    ],
)
def test_replicas_leave_and_join_when_they_meet(place: Path, layouts: tuple[str, str], tables: dict[str, Any]) -> None:
    """By memory and by a checkpoint alike: those that stay go on from their rows, one that joins from another's."""
    case = Case(place / "run", layouts[0], tables=tables, regroup_at=3)
    assert {(told["steps"], told["has_regrouped"]) for told in run(case)} == {(4, True)}
    run(replace(case, layout=layouts[1], generation=1, regroup_at=0))
    (restored,) = events(case, Restored)
    assert (restored.step, restored.source) == (4, "memory")
    saved = Case(place / "saved", layouts[0], tables=tables, drain_at=3)
    run(saved)
    resumed = {**tables, "checkpoint": {"resume": "auto"}}
    run(replace(saved, layout=layouts[1], tables=resumed, drain_at=0))
    assert_same(replace(case, layout=layouts[1]), replace(saved, layout=layouts[1]))
    assert all(loss == loss for loss, _ in losses(case).values())


SGD = {"optim": {"name": "sgd", "momentum": 0.0, "clip": 0.0, "lr": 0.5}, "train": {"precision": "float64"}}


@world
@slow
@pytest.mark.parametrize("order", [("plain", "apart"), ("apart", "plain")])
def test_a_run_may_begin_apart_or_go_on_apart(place: Path, order: tuple[str, str]) -> None:
    """A plain mean after every step of SGD is what synchronous SGD does."""
    kinds = {"plain": SGD, "apart": {**SGD, **local(1, outer_lr=1.0, outer_momentum=0.0)}}
    case = Case(place / "run", "data=2", tables=kinds[order[0]], drain_at=3)
    run(case)
    run(replace(case, tables={**kinds[order[1]], "checkpoint": {"resume": "auto"}}, drain_at=0))
    whole = Case(place / "whole", "data=2", tables=SGD)
    run(whole)
    assert list(losses(case)) == list(losses(whole))
    for step, (loss, _) in losses(case).items():
        assert loss == pytest.approx(losses(whole)[step][0], rel=1e-9)


@world
@slow
@pytest.mark.parametrize(("copies", "sources"), [("on", [("peer", 2), ("peer", 4)]), ("auto", [("start", 0)])])
def test_a_lost_host_was_one_replica(place: Path, copies: str, sources: list[tuple[str, int]]) -> None:
    """Two hosts of two ranks: without a word about it, each host is a replica. Copies of its state would take the link
    that is to be spared, and are on another host only where they are asked for."""
    tables = {**local(2), "elastic": {"second_copies": copies}}
    case = Case(place / "run", "data=4 zero=3", tables=tables, hosts=(0, 0, 1, 1), deaths=((3, "step:4"),))
    run_and_die(case)
    (started,) = events(case, RunStarted)
    assert started.apart.startswith("2 replicas, outer step every 2 steps")
    assert started.layout == "data=4 zero=3 shard=2"
    shutil.rmtree(place / "run" / "host-1")
    run(replace(case, generation=1, hosts=(0, 0, 2, 2), deaths=()))
    (restored,) = events(case, Restored)
    assert (restored.source, restored.step) in sources
    assert_same(case, through(place, replace(case, tables=local(2, replicas=2))))


@world
def test_running_statistics_are_averaged(place: Path) -> None:
    tables = {"train": {"global_batch": 12, "micro_batch": 3}, **local()}
    case = Case(place / "run", "data=2", tables=tables, is_buffered=True)
    run(case)
    one, two = state(case, 0), state(case, 1)
    names = [name for name in one if "running_" in name]
    assert names
    for name in names:
        assert torch.equal(one[name], two[name])
        assert one[name].isfinite().all()


class Scaled(torch.nn.Module):
    """Has a weight without dims, which zero=3 leaves whole."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(0.5))
        self.linear = torch.nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale


def scales(folder: Path) -> list[float]:
    """The scale on this rank when two replicas of two ranks have met, and were saved."""
    x = torch.randn(48, 6, generator=torch.Generator().manual_seed(2))
    data = torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())
    session = Session(
        Scaled,
        data,
        buffered_models.loss,
        run={"folder": str(folder)},
        train={"steps": 4, "global_batch": 8, "micro_batch": 2},
        layout={"data": 4, "zero": 3, "shard": 2},
        sync={"local": {"every": 2}, "compress": {"name": "topk", "ratio": 0.1}},
    )
    run_session(session)
    return [one.parameter.item() for one in session.engine.model.applied.held if one.piece.name == "scale"]


@world
def test_a_weight_without_dims_comes_to_the_same_on_every_rank_of_a_sharded_replica(tmp_path: Path) -> None:
    """Shard ranks would code it together with other neighbours each."""
    found = run_world(scales, 4, tmp_path / "run", timeout_s=300)
    assert len({tuple(one) for one in found}) == 1
    assert found[0] != [0.5], "it learns"
    assert list((tmp_path / "run").rglob("manifest.json")), "it was saved"


# What is said, and what is refused


def test_a_round_is_told_when_it_is_over(tmp_path: Path, alone: None) -> None:
    """One replica by itself: meetings at steps 2, 4 and, as the run ends there, 5."""
    told: list[tuple[int, list[int]]] = []
    began = time.monotonic()
    session = open_session(
        tmp_path,
        train={"steps": 5, "global_batch": 8, "micro_batch": 4, "eval_every": 3},
        sync={"local": {"every": 2}},
        eval_data=torch.utils.data.TensorDataset(torch.randn(4, 4), torch.zeros(4).long()),
    )
    with session:
        for step in session:
            told.append((step.index, [done.step for done in of_kind(tmp_path, StepDone)]))
            if step.index % 2:
                with pytest.raises(UserError, match=f"between outer steps.*after step {step.index + 1}"):
                    session.save()
            if step.index == 2:
                time.sleep(0.2)  # of the round that ends with step 4
            step.run()
    assert told == [(0, []), (1, []), (2, [1, 2]), (3, [1, 2]), (4, [1, 2, 3, 4])]
    steps = of_kind(tmp_path, StepDone)
    assert [done.step for done in steps] == [1, 2, 3, 4, 5]
    assert all(done.seconds > 0 for done in steps)
    assert steps[2].seconds >= 0.2, "a step's time is its own, however late it is told"
    assert sum(done.seconds for done in steps) <= time.monotonic() - began
    assert [one.step for one in of_kind(tmp_path, Evaluated)] == [4, 5]  # due after step 3, and at the end
    (started,) = of_kind(tmp_path, RunStarted)
    assert started.apart == "1 replica, outer step every 2 steps: DiLoCo, outer lr 0.7, momentum 0.9"


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"sync": {"local": {"every": 300}}}, "would never happen in a run of 6 steps"),
        ({"sync": {"local": {"every": 6, "fragments": 4}}}, "4 fragments cannot be spaced evenly within 6 steps"),
        ({"sync": {"local": {"every": 2}}, "layout": {"batch_norm": "sync"}}, "but replicas train locally"),
    ],
)
def test_what_cannot_be_is_said_in_a_sentence(tmp_path: Path, tables: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_job(None, extra=tables_of(Case(tmp_path, tables=tables)))


@pytest.mark.parametrize(
    ("layout", "replicas", "num_workers", "fitted", "left"),
    [
        ("data=8", 4, 7, "data=6", 3),  # the eighth's companion stands by
        ("data=8", 2, 3, "data=3", 1),  # not enough for one of four
        ("data=8", 4, 6, "data=6", 3),
        ("data=8 zero=3", 4, 6, "data=6 zero=3 shard=2", 3),
        ("data=8 zero=3", 4, 8, "data=8 zero=3 shard=2", 4),
        ("data=4 tensor=2", 2, 5, "data=2 tensor=2", 1),
    ],
)
def test_a_smaller_job_has_fewer_replicas(layout: str, replicas: int, num_workers: int, fitted: str, left: int) -> None:
    job = job_of(layout, {"replicas": replicas}, train={"global_batch": 64})
    found = resize_job(job, num_workers)
    assert found is not None
    assert (str(found.layout), found.job.sync.local.replicas) == (fitted, left)
    assert found.summary.endswith(f"of {replicas} remain") == (left != replicas)


def test_replicas_that_do_not_come_out_even() -> None:
    (problem,) = check_workers(job_of("data=4", {"replicas": 3}), 4)
    assert (problem.place, problem.what) == (
        "sync.local.replicas",
        "4 data ranks do not divide into 3 local SGD replicas",
    )


# Slower replicas


class Slow(Hook):
    """Makes the forwards of one replica slow, by burning time where its stopwatch looks."""

    def on_start(self, session: Session) -> None:
        if session.world.rank == 1:
            # Long beside what a busy machine makes of the other's forward.
            session.model.register_forward_pre_hook(lambda *_: time.sleep(0.25))


def taken(folder: Path) -> list[int]:
    counts = []
    job = job_of("data=2", {"every": 2, "balance": True}, train={"steps": 8, "global_batch": 8})
    with Session.from_job(job, folder, [Slow()]) as session:
        for step in session:
            counts.append(len(session.engine.batches.loader.assigned(step.index)))
            step.run()
    return counts


@world
def test_a_slow_replica_is_given_less_to_do(tmp_path: Path) -> None:
    fast, slow = run_world(taken, 2, tmp_path, timeout_s=300)
    assert fast[:2] == slow[:2] == [4, 4]  # the first round measures
    assert [one + other for one, other in zip(fast, slow, strict=True)] == [8] * 8
    assert slow[-1] < 4 < fast[-1]
    assert tree(tmp_path)["data"]["shares"] == [fast[-1], slow[-1]]  # a resumed run goes on with them
    *_, change = of_kind(tmp_path, SharesChanged)
    assert (change.of, change.shares) == ("replica", [fast[-1], slow[-1]])
    again = run_world(resumed, 2, tmp_path, timeout_s=300)
    assert again == [fast[-1], slow[-1]]


def resumed(folder: Path) -> int:
    tables = {"train": {"steps": 10, "global_batch": 8}, "checkpoint": {"resume": str(folder)}}
    with Session.from_job(job_of("data=2", {"every": 2, "balance": True}, **tables), folder / "again") as session:
        for step in session:
            count = len(session.engine.batches.loader.assigned(step.index))
            step.run()
            return count
    return 0
