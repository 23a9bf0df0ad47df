"""Runs with backup workers: every sample is taken once, through late workers, kills and resizes, and sums are exact."""

from __future__ import annotations

import os
import pickle
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from closeranks import Hook, Session
from closeranks.core.errors import CheckpointError, ConfigError
from closeranks.core.events import PushesDropped, RunStarted, StepDone
from closeranks.data.loading.batch_reader import LoadedBatch
from closeranks.data.sampling.order import MicroBatch
from closeranks.telemetry.run_log.sample_log import LoggedMicroBatch, read_samples
from closeranks.testing import WorldError, run_world
from tests.elastic.snapshot_files import shared_memory
from tests.run.generations import Case, Tables, events, losses, run, run_and_die
from tests.run.small import net, open_session

pytestmark = pytest.mark.world
slow = pytest.mark.slow
STEPS, GLOBAL_BATCH, SEQ_LEN = 12, 12, 16
BACKUP: Tables = {
    "sync": {"server": {"count": 1, "backup": 1, "every": 4}},
    "data": {"log_samples": True, "max_bytes": 2000, "eval_fraction": 0.0},
    "train": {"global_batch": GLOBAL_BATCH, "micro_batch": 1, "precision": "float64"},
    "run": {"deterministic": False},
}


@pytest.fixture
def place() -> Iterator[Path]:
    with shared_memory() as folder:
        yield folder


class OneIsLate(Hook):
    """In each step another worker is held up in its first forward, long enough for the others to finish."""

    def __init__(self, case: Case, rank: int) -> None:
        self._rank, self._num_workers = rank, case.size - case.tables["sync"]["server"]["count"]
        self._seen: set[int] = set()

    def on_start(self, session: Session) -> None:
        if self._rank < self._num_workers:
            session.model.register_forward_pre_hook(lambda *_: self._hold_up(session.num_done))

    def _hold_up(self, index: int) -> None:
        if index not in self._seen and random.Random(index).randrange(self._num_workers) == self._rank:
            time.sleep(0.15)
        self._seen.add(index)


class Dies(Hook):
    """In the first generation: a rank is killed in the middle of step 7, in a forward or while it adds pushes."""

    def __init__(self, case: Case, rank: int, victim: int) -> None:
        self._is_victim = rank == victim and case.generation == 0

    def on_start(self, session: Session) -> None:
        reducer = session.engine.reducer
        finish = reducer.finish

        def dying() -> None:
            if session.num_done >= 6:
                os.kill(os.getpid(), signal.SIGKILL)
            finish()

        if self._is_victim:
            reducer.finish = dying  # type: ignore[method-assign]


class WorkerDies(Dies):
    def __init__(self, case: Case, rank: int) -> None:
        super().__init__(case, rank, 0)


class ServerDies(Dies):
    def __init__(self, case: Case, rank: int) -> None:
        super().__init__(case, rank, case.size - 1)


CASE = Case(Path(), "data=4", steps=STEPS, tables=BACKUP, hooks=(OneIsLate,))


def steps_of(case: Case) -> dict[int, StepDone]:
    """Of a step that was done twice, the last."""
    return {done.step: done for done in events(case, StepDone)}


def num_taken(case: Case) -> Counter[tuple[int, int]]:
    """How often each micro-batch was taken. That the log lists what the sums hold, their weights say."""
    log = read_samples(case.folder / "run")
    assert not log.conflicts
    for step, done in steps_of(case).items():
        assert done.weight == SEQ_LEN * len(log.samples_of(step)), step
    return Counter((one.of_step, one.micro_batch) for taken in log.steps.values() for one in taken)


def assert_each_once(case: Case) -> None:
    planned = {(step + 1, index) for step in range(case.steps) for index in range(GLOBAL_BATCH)}
    assert num_taken(case) == Counter(planned)
    assert sum(bool(done.dropped) for done in steps_of(case).values()) >= case.steps // 2, "late workers were dropped"
    assert not steps_of(case)[case.steps].dropped, "the last step waits for all"


def replayed(folder: Path, log: dict[int, tuple[LoggedMicroBatch, ...]], case: Case) -> dict[int, list[float]]:
    """One process that takes in each step what the log says was taken."""
    one = replace(case, folder=folder, layout="data=1", tables={**BACKUP, "sync": {}}, hooks=(Replays,))
    folder.mkdir()
    (folder / "log.pkl").write_bytes(pickle.dumps(log))
    run(one)
    return losses(one)


class Replays(Hook):
    def __init__(self, case: Case, rank: int) -> None:
        self._log = pickle.loads((case.folder / "log.pkl").read_bytes())

    def on_start(self, session: Session) -> None:
        batches, schedule = session.engine.batches, session.context.schedule

        def assigned(step: int) -> tuple[MicroBatch, ...]:
            return tuple(schedule.micro_batches(one.of_step - 1)[one.micro_batch] for one in self._log[step + 1])

        def load_step(step: int, planned: Sequence[MicroBatch]) -> Sequence[LoadedBatch]:
            batches.skip_step(step)
            return batches.loader.read_again(planned)

        batches.assigned, batches.load_step = assigned, load_step  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("size", "count", "backup"), [(4, 1, 1), pytest.param(6, 2, 2, marks=slow), pytest.param(3, 1, 1, marks=slow)]
)
def test_a_step_is_that_of_one_process_that_leaves_out_the_same(
    place: Path, size: int, count: int, backup: int
) -> None:
    tables: Tables = {**BACKUP, "sync": {"server": {"count": count, "backup": backup, "every": 4}}}
    case = replace(CASE, folder=place / "run", layout=f"data={size}", tables=tables)
    run(case)
    assert_each_once(case)
    num_workers = size - count
    log = dict(read_samples(case.folder / "run").steps)
    expected = replayed(place / "same", log, case)
    assert list(losses(case)) == list(expected)
    for step, numbers in losses(case).items():
        assert numbers == pytest.approx(expected[step], rel=1e-9), step
    (said,) = events(case, PushesDropped)
    assert said.dropped == [
        sum(worker in done.dropped for done in steps_of(case).values()) for worker in range(num_workers)
    ]
    assert sum(said.samples) == STEPS * GLOBAL_BATCH
    assert said.returned == sum(one.step != one.of_step for taken in log.values() for one in taken)
    assert (said.returned_weight, said.waiting) == (1.0, 0)
    (started,) = events(case, RunStarted)
    assert f"a step takes the first {num_workers - backup} push" in started.sync


@slow
def test_the_replay_notices_another_micro_batch(place: Path) -> None:
    """A control of the test above."""
    case = replace(CASE, folder=place / "run")
    run(case)
    log = dict(read_samples(case.folder / "run").steps)
    others = {**log, 3: log[3][1:]}
    expected = replayed(place / "other", others, case)
    assert losses(case)[2] == pytest.approx(expected[2], rel=1e-9)
    assert losses(case)[3] != pytest.approx(expected[3], rel=1e-9)


class Forgets(Hook):
    """Nothing is put back."""

    def __init__(self, case: Case, rank: int) -> None: ...

    def on_start(self, session: Session) -> None:
        session.engine.batches.returned.settle = lambda *_: None  # type: ignore[method-assign, union-attr]


@slow
def test_without_putting_them_back_samples_are_missing(place: Path) -> None:
    """A control of every test here that counts samples."""
    case = replace(CASE, folder=place / "run", hooks=(OneIsLate, Forgets))
    run(case)
    assert num_taken(case).total() < STEPS * GLOBAL_BATCH


@pytest.mark.parametrize("dies", [WorkerDies, pytest.param(ServerDies, marks=slow)])
def test_a_kill_in_the_middle_of_a_step_loses_no_sample(place: Path, dies: type[Any]) -> None:
    case = replace(CASE, folder=place / "run", hooks=(OneIsLate, dies))
    run_and_die(case)
    run(replace(case, generation=1))
    assert_each_once(case)


@slow
@pytest.mark.parametrize(("before", "after"), [("data=5", "data=4"), ("data=3", "data=5")])
def test_returned_samples_are_taken_by_another_number_of_workers(place: Path, before: str, after: str) -> None:
    case = replace(CASE, folder=place / "run", layout=before, regroup_at=3)
    assert {told["has_regrouped"] for told in run(case)} == {True}
    run(replace(case, layout=after, generation=1, regroup_at=0))
    assert_each_once(case)


@slow
def test_a_checkpoint_holds_what_was_returned(place: Path) -> None:
    case = replace(CASE, folder=place / "run", drain_at=3)
    assert {(told["reason"], told["steps"]) for told in run(case)} == {("drained", 4)}
    (said,) = events(case, PushesDropped)
    assert said.waiting > 0
    resumed: Tables = {**BACKUP, "checkpoint": {"resume": "auto"}}
    with pytest.raises(WorldError, match=CheckpointError.__name__):
        run(replace(case, layout="data=3", tables={**resumed, "sync": {}}, drain_at=0, hooks=()))
    run(replace(case, tables=resumed, drain_at=0))
    assert_each_once(case)


def with_batch_norm() -> nn.Module:
    return nn.Sequential(net(), nn.BatchNorm1d(2))


def refused(folder: Path, tables: dict[str, Any]) -> str:
    try:
        session: Session = open_session(folder, **tables)
    except ConfigError as error:
        return str(error)
    session.close()
    return ""


@slow
@pytest.mark.parametrize(
    ("tables", "what"),
    [
        ({"model": with_batch_norm}, "batch norm"),
        ({"train": {"steps": 3, "global_batch": 64}}, "every step ends an epoch"),
    ],
)
def test_what_cannot_be_exact_is_refused(tmp_path: Path, tables: dict[str, Any], what: str) -> None:
    tables = {**tables, "sync": {"server": {"count": 1, "backup": 1}}}
    for said in run_world(refused, 3, tmp_path, tables):
        assert what in said
        assert "sync.server.backup" in said
