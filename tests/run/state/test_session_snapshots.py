"""When copies are taken, what is said of them, and how a generation hands over to the next."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

from closeranks import Hook, Session
from closeranks.capture import slots
from closeranks.capture.slots import inspect_slot
from closeranks.core.events import Evaluated, Restored, RunEnded, Saved, Snapshotting, StepDone, Warned
from closeranks.core.system.environment import set_world
from closeranks.core.world import World
from closeranks.elastic.snapshot_paths import SnapshotPaths
from closeranks.elastic.snapshot_writer import SnapshotResult, SnapshotWriter
from closeranks.facts.memory.state_bytes import snapshot_bytes
from closeranks.run.worker.agent_client import configure_worker
from tests.capture.changes import changed
from tests.elastic.snapshot_files import make_snapshot_files, shared_memory
from tests.run import small
from tests.run.generations import Case, assert_same, events, files, losses, run, run_and_die

NO_SAVES = {"checkpoint": {"save": False}}


@pytest.fixture
def place() -> Iterator[Path]:
    with shared_memory() as folder:
        yield folder


@pytest.fixture
def shelf(place: Path) -> Iterator[SnapshotPaths]:
    found = SnapshotPaths(make_snapshot_files(place, 1), 0)
    configure_worker(snapshot_paths=found)
    yield found
    configure_worker()


def steps_of(shelf: SnapshotPaths) -> list[int | None]:
    return [found.header.step if found.header else None for found in map(inspect_slot, shelf.paths[0])]


# In one process


@pytest.mark.usefixtures("alone")
def test_a_run_leaves_its_last_two_steps_in_its_box(tmp_path: Path, shelf: SnapshotPaths) -> None:
    small.train(tmp_path, elastic={"snapshot_every": 1}, **NO_SAVES)
    assert steps_of(shelf) == [4, 3, None, None]
    assert all(changed(path) == [] for path in shelf.paths[0][:2])


@pytest.mark.usefixtures("alone")
def test_without_boxes_nothing_is_kept(tmp_path: Path) -> None:
    configure_worker()
    result = small.train(tmp_path, **NO_SAVES)
    assert result.steps == 4
    assert small.of_kind(tmp_path, Snapshotting) == []


@pytest.mark.usefixtures("alone")
def test_copies_are_taken_every_so_many_steps(tmp_path: Path, shelf: SnapshotPaths) -> None:
    small.train(tmp_path, train={"steps": 8}, elastic={"snapshot_every": 3}, **NO_SAVES)
    assert steps_of(shelf) == [6, 3, None, None]
    (said,) = small.of_kind(tmp_path, Snapshotting)
    assert (said.every, said.copies, said.step) == (3, "none", 3)
    assert said.bytes > 0


@pytest.mark.usefixtures("alone")
def test_auto_takes_fewer_copies_of_short_steps(tmp_path: Path, shelf: SnapshotPaths) -> None:
    """A step of a tiny model takes a millisecond; its copy must not take a fiftieth of that."""
    small.train(tmp_path, train={"steps": 12}, elastic={"snapshot_cost": 1e-4}, **NO_SAVES)
    (said,) = small.of_kind(tmp_path, Snapshotting)
    assert said.every > 1
    assert said.cost_s > 0
    assert max(step for step in steps_of(shelf) if step is not None) < 12


@pytest.mark.usefixtures("alone")
def test_a_later_generation_goes_on_and_repeats_nothing(tmp_path: Path, shelf: SnapshotPaths) -> None:
    small.train(tmp_path, elastic={"snapshot_every": 1}, **NO_SAVES)
    configure_worker(snapshot_paths=shelf)  # a new process
    set_world(World(launcher="testing", generation=1))
    changes = {"train": {"steps": 6}, "elastic": {"snapshot_every": 1}}
    result = small.train(tmp_path, **changes, checkpoint={"save": False, "resume": "auto"})
    assert result.steps == 6
    restored = small.of_kind(tmp_path, Restored)
    assert [(event.step, event.source) for event in restored] == [(4, "memory")]
    assert small.of_kind(tmp_path, Warned) == []
    assert steps_of(shelf) == [6, 5, None, None]


@pytest.mark.usefixtures("alone")
def test_a_later_generation_keeps_the_pace_of_the_one_before_until_it_knows_better(
    tmp_path: Path, shelf: SnapshotPaths
) -> None:
    """No copy is joined in its first three steps, after which ranks look at what copies cost."""
    small.train(tmp_path, elastic={"snapshot_every": 3}, **NO_SAVES)
    configure_worker(snapshot_paths=shelf)
    set_world(World(launcher="testing", generation=1))
    small.train(tmp_path, train={"steps": 7}, checkpoint={"save": False, "resume": "auto"})
    assert [event.step for event in small.of_kind(tmp_path, Restored)] == [3]
    assert [event.every for event in small.of_kind(tmp_path, Snapshotting)] == [3]
    assert steps_of(shelf) == [6, 3, None, None]


@pytest.mark.usefixtures("alone")
def test_copies_that_make_a_slot_ready_are_no_measure(
    tmp_path: Path, shelf: SnapshotPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that takes over finds its state in place: its first two copies are its first into either slot, and
    pinning memory for a device takes many times as long as a copy."""
    small.train(tmp_path, elastic={"snapshot_every": 1}, **NO_SAVES)
    configure_worker(snapshot_paths=shelf)
    set_world(World(launcher="testing", generation=1))
    join, steps = SnapshotWriter.wait, list[int]()

    def slow_at_first(keeper: SnapshotWriter) -> SnapshotResult | None:
        joined = join(keeper)
        if joined is None:
            return None
        steps.append(joined.step)
        return replace(joined, stall_s=100.0, late_s=100.0) if len(steps) <= 2 else joined

    monkeypatch.setattr(SnapshotWriter, "wait", slow_at_first)
    small.train(tmp_path, train={"steps": 12}, checkpoint={"save": False, "resume": "auto"})
    assert steps[:5] == [5, 6, 7, 8, 9]
    assert all(said.cost_s < 50 for said in small.of_kind(tmp_path, Snapshotting))


@pytest.mark.usefixtures("alone")
def test_a_script_with_two_sessions_finds_each_ones_own(tmp_path: Path, shelf: SnapshotPaths) -> None:
    small.train(tmp_path / "one", **NO_SAVES)
    small.train(tmp_path / "two", train={"steps": 3}, **NO_SAVES)
    runs = {found.header.run for found in map(inspect_slot, shelf.paths[0]) if found.header}
    assert runs == {1}  # the second writes where the first did


@pytest.mark.usefixtures("alone")
def test_an_evaluation_that_was_cut_short_is_made_again(tmp_path: Path, shelf: SnapshotPaths) -> None:
    """The copy of a step is taken after its evaluation."""

    class Dying(small.Hook):
        def on_eval(self, session: object, result: Evaluated) -> None:
            assert steps_of(shelf)[:2] in ([2, 1], [2, 3], [0, 1], [2, None], [0, None])
            if result.step == 2:
                raise KeyboardInterrupt

    given = {"train": {"steps": 4, "eval_every": 2}, "elastic": {"snapshot_every": 1}, **NO_SAVES}
    with pytest.raises(KeyboardInterrupt):
        small.train(tmp_path, eval_data=small.dataset(8), hooks=[Dying()], **given)
    assert 2 not in steps_of(shelf)


@pytest.mark.usefixtures("alone")
def test_want_of_memory_is_a_warning(tmp_path: Path, place: Path) -> None:
    configure_worker(snapshot_paths=SnapshotPaths((("/dev/full",) * 4,), 0))
    result = small.train(tmp_path, **NO_SAVES)
    configure_worker()
    assert result.steps == 4
    (warned,) = small.of_kind(tmp_path, Warned)
    assert "no memory for copies of the state" in warned.what


@pytest.mark.usefixtures("alone")
def test_training_goes_on_while_a_copy_is_sealed(
    tmp_path: Path, shelf: SnapshotPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy of step 3 is held up until step 5 is over; that of step 6 does not begin before it is sealed."""
    steps_seen: list[list[int | None]] = []
    is_over = threading.Event()
    held_up: list[bool] = []

    class Watching(small.Hook):
        def on_step(self, session: object, step: StepDone) -> None:
            if step.step == 5:
                steps_seen.append(steps_of(shelf))
                is_over.set()

    def point(label: str) -> None:
        if label == "slot.before_header" and steps_of(shelf)[0] == 0:  # the second copy of all
            held_up.append(is_over.wait(20.0))

    monkeypatch.setattr(slots, "failpoint", point)
    given = {"train": {"steps": 8}, "elastic": {"snapshot_every": 3}, **NO_SAVES}
    small.train(tmp_path, hooks=[Watching()], **given)
    assert held_up == [True]
    assert steps_seen == [[0, None, None, None]]
    assert steps_of(shelf) == [6, 3, None, None]


# Worlds


@pytest.mark.world
@pytest.mark.parametrize(
    "label",
    [
        "slot.after_data:5",
        pytest.param("slot.in_data:3", marks=pytest.mark.slow),
        pytest.param("slot.before_header:6", marks=pytest.mark.slow),
    ],
)
def test_a_kill_while_a_copy_is_sealed_costs_one_copy_more(place: Path, label: str) -> None:
    """Copies of steps 0, 2 and 4, each into two slots; the third is not sealed in both."""
    tables = {"elastic": {"snapshot_every": 2}}
    case = Case(place / "run", "data=2 zero=3", deaths=((1, label),), tables=tables, steps=6)
    run_and_die(case)
    run(replace(case, generation=1, deaths=()))
    assert [event.step for event in events(case, Restored)] == [4 if label == "slot.before_header:6" else 2]
    through = replace(case, folder=place / "through", deaths=())
    run(through)
    assert_same(case, through)


@pytest.mark.world
def test_a_generation_ends_by_agreement_and_the_next_repeats_no_step(place: Path) -> None:
    case = Case(place / "run", "data=2 zero=3", steps=5, regroup_at=3, tables={"elastic": {"snapshot_every": 4}})
    told = run(case)
    assert [(one["reason"], one["steps"], one["has_regrouped"]) for one in told] == [("regrouped", 3, True)] * 2
    assert all(one["kept"][-1] == 3 for one in told)
    assert [found.header.step for found in map(inspect_slot, files(case, 0)) if found.header].count(3) == 4
    assert events(case, RunEnded) == events(case, Saved) == []
    finished = replace(case, generation=1, regroup_at=0)
    run(finished)
    assert [event.step for event in events(case, StepDone)] == [1, 2, 3, 4, 5]
    assert [event.reason for event in events(case, RunEnded)] == ["finished"]
    through = replace(finished, folder=place / "through", generation=0)
    run(through)
    assert_same(finished, through)


@pytest.mark.world
def test_a_drain_beats_a_regroup(place: Path) -> None:
    case = Case(place / "run", "data=2", steps=5, regroup_at=2, drain_at=2)
    told = run(case)
    assert [(one["reason"], one["steps"], one["has_regrouped"]) for one in told] == [("drained", 2, False)] * 2
    assert len(events(case, Saved)) == 1


@pytest.mark.world
def test_what_is_said_of_copies(place: Path) -> None:
    shards = Case(place / "shards", "data=2 zero=3", steps=4)
    run(shards)
    replicas = Case(place / "replicas", "data=2", steps=4)
    run(replicas)
    apart = Case(place / "apart", "data=2 zero=1", steps=4, hosts=(0, 1))
    run(apart)
    said = [events(case, Snapshotting)[0].copies for case in (shards, replicas, apart)]
    assert said == ["peer", "replica", "peer on another host"]


@pytest.mark.world
def test_every_n_th_step_costs_at_most_n(place: Path) -> None:
    case = Case(place / "run", "data=2", deaths=((0, "step:6"),), tables={"elastic": {"snapshot_every": 4}}, steps=7)
    run_and_die(case)
    told = run(replace(case, generation=1, deaths=()))
    assert events(case, Restored)[0].step == 4
    assert told[0]["kept"][0] == 4
    lines = (place / "run" / "losses-0.jsonl").read_text().splitlines()
    assert [json.loads(line)[0] for line in lines] == [1, 2, 3, 4, 5, 6, 5, 6, 7]
    twice = [json.loads(line) for line in lines if json.loads(line)[0] in (5, 6)]
    assert twice[:2] == twice[2:]
    assert sorted(losses(case)) == [1, 2, 3, 4, 5, 6, 7]


# Beside saves


class StoppedWriter(Hook):
    """From the second step on nobody writes: a save that was taken stays in its slot."""

    def __init__(self, case: Case, rank: int) -> None:
        self._is_stopped = False

    def on_step(self, session: Session, step: StepDone) -> None:
        saver = session._capture.checkpoints._saver
        while step.step == 2 and not self._is_stopped:
            process = saver._client._process if saver is not None else None
            if process is not None:
                os.kill(process.pid, signal.SIGSTOP)
                self._is_stopped = True
            time.sleep(0.01)


@pytest.mark.world
def test_a_kill_while_a_save_is_being_written_redoes_no_more_than_one_step(place: Path) -> None:
    tables = {"elastic": {"snapshot_every": 1}, "checkpoint": {"save": True, "every": 3}}
    case = Case(place / "run", "data=2 zero=2", deaths=((1, "step:6"),), tables=tables, steps=8, hooks=(StoppedWriter,))
    run_and_die(case)
    run(replace(case, generation=1, deaths=(), hooks=()))
    (restored,) = events(case, Restored)
    assert restored.source == "memory"
    assert restored.step >= 5
    saved = [event.step for event in events(case, Saved)]
    assert 3 not in saved  # its slot was still held when the worker was killed
    undisturbed = Case(place / "whole", "data=2 zero=2", tables={**tables, **NO_SAVES}, steps=8)
    run(undisturbed)
    assert_same(undisturbed, case)


@pytest.mark.usefixtures("alone")
def test_copies_and_a_save_take_the_memory_that_the_formula_says(tmp_path: Path, shelf: SnapshotPaths) -> None:
    """Two whole copies and one of what is saved, which is all of it on one rank; each with its header and index, and
    in slices of two MiB."""
    with small.open_session(
        tmp_path, model=Large, elastic={"snapshot_every": 1}, checkpoint={"every": 2}, train={"steps": 4}
    ) as session:
        for step in session:
            step.run()
        state = sum(one.tensor.numel() * one.tensor.element_size() for one in session.state.tensors())
        keeper, saver = session._capture.snapshots._writer, session._capture.checkpoints._saver
        assert keeper is not None
        assert saver is not None
        held = keeper.num_bytes + len(saver._slot.bytes)
        assert snapshot_bytes(state) + state <= held <= snapshot_bytes(state) + state + 3 * (4 << 20)


class Large(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 1 << 19), nn.Linear(1 << 19, 2))
