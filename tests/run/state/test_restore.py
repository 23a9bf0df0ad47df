"""A run whose workers are killed goes on from memory, and comes to the same bits as one that never failed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from closeranks.capture.slots import DATA_AT, SealedSlot, inspect_slot
from closeranks.core.events import Restored, Resumed
from closeranks.core.system import failpoints
from closeranks.testing import WorldError
from tests.elastic.snapshot_files import shared_memory
from tests.faults.cases import AROUND_RECOVERY
from tests.run.generations import Case, assert_same, events, files, losses, run, run_and_die, state

pytestmark = pytest.mark.world


@pytest.fixture
def place() -> Iterator[Path]:
    with shared_memory() as folder:
        yield folder


def undisturbed(place: Path, case: Case) -> Case:
    """On as many hosts: with other ones sums are made in another order."""
    through = replace(case, folder=place / "through", deaths=(), generation=0)
    run(through)
    return through


LAYOUTS = [
    "data=3 zero=3",
    pytest.param("pipeline=2", marks=pytest.mark.slow),
    pytest.param("data=2", marks=pytest.mark.slow),
    pytest.param("data=2 zero=1", marks=pytest.mark.slow),
    pytest.param("tensor=2", marks=pytest.mark.slow),
    pytest.param("data=4 zero=3 shard=2", marks=pytest.mark.slow),
    pytest.param("pipeline=2 schedule=zbv", marks=pytest.mark.slow),
    pytest.param("data=2 zero=3 tensor=2", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_worker_killed_in_the_middle_of_a_copy_costs_one_step(place: Path, layout: str) -> None:
    case = Case(place / "run", layout, deaths=((1, "slot.in_data:5"),))  # of step 4, after that of the start
    run_and_die(case)
    run(replace(case, generation=1, deaths=()))
    (restored,) = events(case, Restored)
    assert (restored.source, restored.generation) == ("memory", 1)
    has_replicas = layout in ("data=2", "data=4 zero=3 shard=2")
    assert restored.step == 3 or (has_replicas and restored.step == 4)  # which the other replica may have
    assert restored.notes == []  # a torn slot is what the other one of its pair is for
    assert_same(case, undisturbed(place, case))


@pytest.mark.parametrize(
    "label",
    [
        "step:1",
        pytest.param("step:6", marks=pytest.mark.slow),
        pytest.param("slot.before_header:7", marks=pytest.mark.slow),
    ],
)
def test_a_kill_at_the_first_and_at_the_last_step(place: Path, label: str) -> None:
    case = Case(place / "run", "data=2 zero=3", deaths=((1, label),))
    run_and_die(case)
    run(replace(case, generation=1, deaths=()))
    assert_same(case, undisturbed(place, case))


def test_batch_norm_and_other_buffers(place: Path) -> None:
    tables = {"train": {"global_batch": 12, "micro_batch": 3}}
    case = Case(place / "run", "data=2", tables=tables, deaths=((0, "slot.after_data:4"),), is_buffered=True)
    run_and_die(case)
    run(replace(case, generation=1, deaths=()))
    through = undisturbed(place, case)
    assert_same(case, through)
    assert any("running_mean" in name for name in state(case, 0))


@pytest.mark.parametrize("layout", ["data=2 zero=3", pytest.param("pipeline=2", marks=pytest.mark.slow)])
def test_a_lost_host_comes_back_from_its_peer(place: Path, layout: str) -> None:
    case = Case(place / "run", layout, hosts=(0, 1), deaths=((1, "step:4"),))
    run_and_die(case)
    shutil.rmtree(place / "run" / "host-1")
    run(replace(case, generation=1, hosts=(0, 2), deaths=()))
    (restored,) = events(case, Restored)
    assert restored.source == "peer"
    assert restored.step in (3, 4)
    assert_same(case, undisturbed(place, case))


@pytest.mark.slow
def test_a_fresh_host_of_replicas_comes_from_the_other(place: Path) -> None:
    case = Case(place / "run", "data=4", hosts=(0, 0, 1, 1), deaths=((3, "step:3"),))
    run_and_die(case)
    shutil.rmtree(place / "run" / "host-1")
    run(replace(case, generation=1, hosts=(0, 0, 2, 2), deaths=()))
    assert events(case, Restored)[0].source == "peer"
    assert all(inspect_slot(path).reason == "empty" for path in files(case, 0) if "peer" in path)  # replicas suffice
    assert_same(case, undisturbed(place, case))


def flip(path: str) -> None:
    """One bit of a tensor in a slot."""
    at = DATA_AT + SealedSlot(path).index.entries[2].offset + 1
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 16]))


def flip_newest(case: Case, box: int, pair: str) -> None:
    """In the newer slot of a box."""
    found = [path for path in files(case, 0) if f"box-{box}-{pair}" in path and inspect_slot(path).header]
    flip(max(found, key=lambda path: SealedSlot(path).header.step))


@pytest.mark.parametrize(("layout", "pairs", "step", "source"), [
    pytest.param("data=2", ["own"], 6, "memory", marks=pytest.mark.slow),  # of the other replica, on the same host
    ("data=2 zero=3", ["own"], 6, "peer"),
    pytest.param("data=2 zero=3", ["own", "peer"], 5, "memory", marks=pytest.mark.slow),
])  # fmt: skip
def test_a_flipped_bit_is_passed_over_by_all(
    place: Path, layout: str, pairs: list[str], step: int, source: str
) -> None:
    """The run is over; its boxes hold the last two steps."""
    case = Case(place / "run", layout, tables={"checkpoint": {"save": False}})
    run(case)
    through = replace(case, folder=place / "through")
    run(replace(through))
    for pair in pairs:  # rank 0's own slot is in box 0, its copy in box 1
        flip_newest(case, 0 if pair == "own" else 1, pair)
    run(replace(case, generation=1))
    (restored,) = events(case, Restored)
    assert (restored.step, restored.source) == (step, source)
    assert sum("damaged: the bytes of model/" in note for note in restored.notes) == len(pairs)
    assert_same(case, through)


@pytest.mark.parametrize(
    "layouts",
    [
        ("data=4 zero=3", "data=2 zero=3", "data=3 zero=3"),
        pytest.param(("data=3", "data=2", "data=4"), marks=pytest.mark.slow),
    ],
)
def test_a_run_shrinks_and_grows(place: Path, layouts: tuple[str, str, str]) -> None:
    case = Case(place / "run", layouts[0], tables={"train": {"precision": "float64"}}, deaths=((1, "step:2"),))
    through = undisturbed(place, case)
    run_and_die(case)
    run_and_die(replace(case, layout=layouts[1], generation=1, deaths=((1, "step:4"),)))
    run(replace(case, layout=layouts[2], generation=2, deaths=()))
    assert [event.source for event in events(case, Restored)] == ["memory", "memory"]
    found, expected = losses(case), losses(through)
    assert found.keys() == expected.keys()
    for step in expected:
        assert found[step] == pytest.approx(expected[step], rel=1e-9)


def test_a_run_grows_onto_another_host(place: Path) -> None:
    tables = {"train": {"precision": "float64"}}
    case = Case(place / "run", "data=2 zero=3", tables=tables, hosts=(0, 0), deaths=((1, "step:3"),))
    through = undisturbed(place, case)
    run_and_die(case)
    run(replace(case, layout="data=3 zero=1", generation=1, hosts=(0, 0, 1), deaths=()))
    assert events(case, Restored)[0].source == "peer"
    assert losses(case)[6] == pytest.approx(losses(through)[6], rel=1e-9)


RESTORING = ["restore.agreed", "restore.fetching", "restore.before_verify", "restore.after_verify"]


def test_all_points_of_restoring_are_swept() -> None:
    """Those before and after it are swept by whole runs."""
    restoring = {label for label in failpoints.FAILPOINTS if label.startswith("restore.")}
    assert restoring - set(AROUND_RECOVERY) == set(RESTORING)


EARLY = [pytest.param(label, marks=pytest.mark.slow) for label in RESTORING if label != "restore.fetching"]


@pytest.mark.parametrize(
    "label",
    ["restore.fetching", "slot.in_data", *EARLY, pytest.param("slot.before_header", marks=pytest.mark.slow)],
)
def test_a_second_kill_while_taking_over_loses_nothing(place: Path, label: str) -> None:
    case = Case(place / "run", "data=2 zero=3", steps=4, hosts=(0, 1), deaths=((1, "step:2"),))
    run_and_die(case)
    shutil.rmtree(place / "run" / "host-1")
    later = replace(case, hosts=(0, 2))
    run_and_die(replace(later, generation=1, deaths=((1, label),)))
    run(replace(later, generation=2, deaths=()))
    first = events(case, Restored)[-1]
    assert first.step in (1, 2)
    assert_same(case, undisturbed(place, case))


def test_without_a_whole_state_in_memory_the_newest_checkpoint_counts(place: Path) -> None:
    tables = {"checkpoint": {"every": 2}}
    case = Case(place / "run", "data=2 zero=3", tables=tables, deaths=((1, "step:5"),))
    run_and_die(case)
    shutil.rmtree(place / "run" / "host-0")
    run(replace(case, generation=1, deaths=()))
    (restored,) = events(case, Restored)
    assert (restored.step, restored.source) in ((2, "checkpoint"), (4, "checkpoint"))
    assert events(case, Resumed) == []
    assert_same(case, undisturbed(place, case))


def test_a_checkpoint_of_an_earlier_run_is_not_taken_for_its_own(place: Path) -> None:
    """The run begins afresh beside checkpoints of another; when its memory is lost it begins afresh again."""
    tables = {"checkpoint": {"folder": str(place / "saves"), "every": 0}}
    earlier = Case(place / "earlier", "data=2", steps=3, tables=tables)
    run(earlier)
    case = replace(earlier, folder=place / "run", deaths=((1, "step:2"),), tables=tables)
    run_and_die(case)
    shutil.rmtree(place / "run" / "host-0")
    run(replace(case, generation=1, deaths=()))
    (restored,) = events(case, Restored)
    assert (restored.step, restored.source) == (0, "start")
    assert losses(case) == losses(earlier)


def spoil_checkpoints(case: Case) -> None:
    """One bit in the middle of each file of tensors, which only reading finds out."""
    for path in (case.folder / "run" / "checkpoints").glob("step-*/*.safetensors"):
        data = bytearray(path.read_bytes())
        data[-100] ^= 16
        path.write_bytes(data)


@pytest.mark.parametrize("every", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_where_nothing_is_sound_any_more_a_fresh_model_begins(place: Path, every: int) -> None:
    """What a damaged copy leaves in a model must not be what the run begins with."""
    checkpoint = {"checkpoint": {"every": every, "save": bool(every)}}
    case = Case(place / "run", "data=2", steps=4, tables=checkpoint, deaths=((1, "step:3"),))
    run_and_die(case)
    for path in files(case, 0):
        if inspect_slot(path).header:
            flip(path)
    spoil_checkpoints(case)
    with pytest.raises(WorldError, match="no state of this run is valid any more"):
        run(replace(case, generation=1, deaths=()))
    assert events(case, Restored) == []
    run(replace(case, generation=2, deaths=()))
    (restored,) = events(case, Restored)
    assert (restored.step, restored.source) == (0, "start")
    assert any("it was marked as void" in note for note in restored.notes)
    assert_same(case, undisturbed(place, case))


def test_a_kill_in_the_very_first_copy_is_no_loss_worth_a_word(place: Path) -> None:
    case = Case(place / "run", "data=2 zero=3", steps=2, deaths=((1, "slot.in_data:1"),))
    run_and_die(case)
    run(replace(case, generation=1, deaths=()))
    (restored,) = events(case, Restored)
    assert (restored.step, restored.source, restored.notes) == (0, "start", [])
