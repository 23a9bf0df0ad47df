"""Synchronous runs in which a slow data rank takes fewer micro-batches: the same samples and losses, and equal bits
after a kill."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from closeranks import Hook, Session
from closeranks.core.errors import ConfigError
from closeranks.core.events import Restored, SharesChanged, StepDone
from closeranks.facts.layout import Layout
from closeranks.facts.mesh import Mesh
from closeranks.run.components.sync.rebalancing import seconds_by_data_rank
from closeranks.run.job.job import load_job
from closeranks.testing import run_world
from tests.elastic.snapshot_files import shared_memory
from tests.run.generations import Case, Tables, assert_same, events, losses, run, run_and_die, tables_of
from tests.run.saved import tensors, tree
from tests.run.trajectories import TINY, largest_difference

slow = pytest.mark.slow
world = pytest.mark.world


@pytest.fixture
def place() -> Iterator[Path]:
    with shared_memory() as folder:
        yield folder


class Stated:
    """A stopwatch that says what it is told: what a busy machine measures differs from run to run."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._num_steps = 0

    def start(self) -> None: ...

    def stop(self, num_micro: int) -> None:
        self._num_steps += 1

    def pop_times(self) -> Sequence[float]:
        num_steps, self._num_steps = self._num_steps, 0
        return [self.seconds] * num_steps

    def close(self) -> None: ...


class FirstIsSlow(Hook):
    """One rank of the first data rank takes four times as long as the others."""

    def __init__(self, case: Case, rank: int) -> None:
        self.stopwatch = Stated(4.0 if rank == 0 else 1.0)

    def on_start(self, session: Session) -> None:
        session.context.step_timer._stopwatch = self.stopwatch


class FirstRecovers(FirstIsSlow):
    """After step 5 all are equally fast."""

    def on_step(self, session: Session, step: StepDone) -> None:
        self.stopwatch.seconds = 1.0 if step.step >= 5 else self.stopwatch.seconds


class FirstSleeps(Hook):
    """Really slow, by its own clock."""

    def __init__(self, case: Case, rank: int) -> None:
        self._is_slow = rank == 0

    def on_start(self, session: Session) -> None:
        if self._is_slow:
            session.model.register_forward_pre_hook(lambda *_: time.sleep(0.7))


REBALANCE: Tables = {
    "elastic": {"stragglers": "rebalance", "slow_steps": 2, "snapshot_every": 1},
    "train": {"global_batch": 5, "precision": "float64"},
    "data": {"log_samples": True},
}
HOLD = {**REBALANCE, "layout": {"hold": "step"}}
LAYOUTS = [
    ("data=3", REBALANCE),
    pytest.param("data=3 zero=1", REBALANCE, marks=slow),
    pytest.param("data=3 zero=2", HOLD, marks=slow),
    pytest.param("data=2 zero=3", HOLD, marks=slow),
    pytest.param("data=2 tensor=2", REBALANCE, marks=slow),
    pytest.param("data=2 zero=1 pipeline=2", REBALANCE, marks=slow),
    pytest.param("data=3", {**REBALANCE, "train": {"global_batch": 5, "precision": "fp16"}}, marks=slow),
]


def undisturbed(case: Case, folder: Path, layout: str = "") -> Case:
    """The same run without faults; with a layout, one in which nobody is slow and all have equal shares."""
    if not layout:
        return replace(case, folder=folder, deaths=(), generation=0)
    tables = {**case.tables, "elastic": {"snapshot_every": 1}, "layout": {}}
    return replace(case, folder=folder, layout=layout, tables=tables, deaths=(), generation=0, hooks=())


def samples(case: Case) -> dict[tuple[int, int], list[int]]:
    """By step and micro-batch, of all ranks."""
    found: dict[tuple[int, int], list[int]] = {}
    for path in (case.folder / "run").rglob("samples-*.jsonl"):
        for row in map(json.loads, path.read_text().splitlines()):
            assert (row["step"], row["micro_batch"]) not in found, "two ranks computed the same micro-batch"
            found[row["step"], row["micro_batch"]] = row["samples"]
    return found


@world
@pytest.mark.parametrize(("layout", "tables"), LAYOUTS)
def test_a_slow_rank_takes_fewer_and_nothing_else_changes(place: Path, layout: str, tables: Tables) -> None:
    case = Case(place / "run", layout, steps=5, tables=tables, hooks=(FirstIsSlow,))
    run(case)
    (change,) = events(case, SharesChanged)
    assert change.step == 3  # the first step warms up, two measure
    assert change.shares[0] == 1 < change.before[0]
    assert sum(change.shares) == sum(change.before) == 5
    assert tree(place / "run" / "run")["data"]["shares"] == change.shares
    one = undisturbed(case, place / "one", "data=1")
    run(one)
    assert samples(case) == samples(one)
    precision = tables["train"]["precision"]
    tolerance = 1e-9 if precision == "float64" else 2e-3
    for step, (loss, norm) in losses(one).items():
        assert losses(case)[step] == [pytest.approx(loss, rel=tolerance), pytest.approx(norm, rel=10 * tolerance)]
    if precision == "float64":
        ours, theirs = (tensors(each.folder / "run", "model") for each in (case, one))
        assert largest_difference(ours, theirs) < 1e-9


@world
@pytest.mark.parametrize(
    "layout",
    ["data=3", *(pytest.param(layout, marks=slow) for layout in ("data=3 zero=1", "data=2 tensor=2"))],
)
def test_a_kill_with_uneven_shares_leaves_equal_bits(place: Path, layout: str) -> None:
    case = Case(place / "run", layout, steps=7, tables=REBALANCE, deaths=((1, "step:5"),), hooks=(FirstIsSlow,))
    run_and_die(case)
    run(replace(case, generation=1, deaths=()))
    assert [restored.source for restored in events(case, Restored)] == ["memory"]
    through = undisturbed(case, place / "through")
    run(through)
    assert [change.shares for change in events(through, SharesChanged)] == [
        change.shares for change in events(case, SharesChanged)
    ]
    assert_same(case, through)


@world
@slow
def test_a_drained_run_resumes_with_its_shares(place: Path) -> None:
    case = Case(place / "run", "data=3", steps=7, tables=REBALANCE, drain_at=5, hooks=(FirstIsSlow,))
    run(case)
    assert tree(place / "run" / "run")["data"]["shares"][0] == 1
    run(replace(case, tables={**REBALANCE, "checkpoint": {"resume": "auto"}}, drain_at=0))
    through = replace(undisturbed(case, place / "through"), drain_at=0)
    run(through)
    assert_same(case, through)


@world
@slow
def test_a_rank_that_is_fast_again_takes_its_part_again(place: Path) -> None:
    case = Case(place / "run", "data=2", steps=9, tables=REBALANCE, hooks=(FirstRecovers,))
    run(case)
    found = [(change.step, change.of, change.before, change.shares) for change in events(case, SharesChanged)]
    assert found == [(3, "data rank", [3, 2], [1, 4]), (7, "data rank", [1, 4], [3, 2])]


@world
@slow
def test_a_rank_that_sleeps_takes_fewer_by_its_own_clock(place: Path) -> None:
    case = Case(place / "run", "data=2", steps=4, tables=REBALANCE, hooks=(FirstSleeps,))
    run(case)
    first, *_ = events(case, SharesChanged)
    assert first.shares[0] < 3


@world
@slow
def test_fewer_ranks_start_with_equal_shares(place: Path) -> None:
    case = Case(place / "run", "data=3", steps=5, tables=REBALANCE, hooks=(FirstIsSlow,))
    run(case)
    assert tree(place / "run" / "run")["data"]["shares"][0] == 1
    resumed = {**REBALANCE, "checkpoint": {"resume": "auto"}}
    taken = run_world(_assigned, 2, replace(case, layout="data=2", steps=7, tables=resumed), timeout_s=300)
    assert taken == [3, 2]


def _assigned(case: Case) -> int:
    job = load_job(None, extra=tables_of(case)).value
    with Session.from_job(job, case.folder / "run") as session:
        for step in session:
            count = len(session.engine.batches.loader.assigned(step.index))
            step.run()
            return count
    return 0


@pytest.mark.parametrize(
    ("tables", "said", "fix"),
    [
        (
            {"layout": {"zero": 3}},
            "zero = 3 gathers weights and reduces gradients over all data ranks in",
            "hold",
        ),
        ({"layout": {"zero": 2}}, "zero = 2 reduces gradients over all data ranks in every micro-batch", "hold"),
        ({"layout": {"batch_norm": "sync"}}, "needs all data ranks in every forward", 'batch_norm = "micro"'),
        ({"sync": {"server": {"count": 1}}}, "it is the mode that says whether workers wait", "sync.server.mode"),
        ({"sync": {"local": {"every": 2}}}, "do not wait for each other in every step", "sync.local.balance"),
    ],
)
def test_what_cannot_be_rebalanced_is_refused(tables: Tables, said: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_job(None, extra={**TINY, "elastic": {"stragglers": "rebalance"}, **tables})
    (problem,) = caught.value.problems
    assert problem.place == "elastic.stragglers"
    assert said in problem.what
    assert fix in problem.fix


def test_what_can_be_rebalanced_is_accepted() -> None:
    for layout in ({"zero": 3, "hold": "step"}, {"zero": 2, "hold": "step"}, {"zero": 1}, {"tensor": 2, "pipeline": 2}):
        job = load_job(None, extra={**TINY, "elastic": {"stragglers": "rebalance"}, "layout": layout}).value
        assert job.elastic.stragglers == "rebalance"


def test_the_slowest_rank_of_a_data_rank_counts_and_all_must_be_measured() -> None:
    mesh = Mesh(Layout(data=2, tensor=2, pipeline=2))  # tensor is fastest, then data, then pipeline
    assert seconds_by_data_rank([1.0, 2.0, 3.0, 4.0, 5.0, 1.0, 1.0, 1.0], mesh) == [5.0, 4.0]
    assert seconds_by_data_rank([1.0, 2.0, 3.0, 0.0, 5.0, 1.0, 1.0, 1.0], mesh) == [5.0, 0.0]
    assert seconds_by_data_rank([1.0, 2.0, 3.0, 4.0], Mesh(Layout(data=4, zero=1, shard=2))) == [1.0, 2.0, 3.0, 4.0]
