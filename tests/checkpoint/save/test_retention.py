"""Retention takes what it should, and never anything that somebody needs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from closeranks.checkpoint.format.manifest import MANIFEST, folder_name
from closeranks.checkpoint.save import retention, save_tiers
from closeranks.checkpoint.save.retention import (
    CheckpointFiles,
    CheckpointFolder,
    RetentionPolicy,
    age_key,
    apply_retention,
    expired,
    plan_removal,
)
from closeranks.storage.protocol import StorageError
from tests.checkpoint import saving
from tests.checkpoint.memory_storage import Killed, MemoryStorage


@dataclass(frozen=True)
class Saved:
    name: str
    step: int
    metric: float | None = None


def saved(*steps: int, part: int = 1) -> list[Saved]:
    return [Saved(folder_name(step, part), step) for step in steps]


def test_the_last_the_best_and_every_nth_stay() -> None:
    all_of_them = [Saved(folder_name(step), step, abs(step - 42.0)) for step in range(10, 110, 10)]
    names = expired(all_of_them, 2, 50, 1)
    assert names == tuple(folder_name(step) for step in (10, 20, 30, 60, 70, 80))  # 40 is the best, 50 an nth


def test_the_newest_two_stay_whatever_is_asked() -> None:
    assert expired(saved(1, 2, 3), 0, 0, 0) == (folder_name(1),)
    assert expired(saved(1, 2), 0, 0, 0) == ()


def test_a_later_part_of_the_run_is_newer_at_any_step() -> None:
    """A run that went back to step 20 writes step 25 of its second part after step 40 of its first."""
    names = [*saved(20, 30, 40), *saved(25, 26, part=2)]
    assert expired(names, 2, 0, 0) == tuple(folder_name(step) for step in (20, 30, 40))
    assert age_key(folder_name(25, 2)) > age_key(folder_name(40))


def test_of_two_as_good_the_newer_stays_and_what_is_no_number_is_not_good() -> None:
    rows = [(1, 0.5), (2, 0.5), (3, float("nan")), (4, None), (5, float("-inf")), (6, 9.0), (7, 9.0)]
    manifests = [Saved(folder_name(step), step, metric) for step, metric in rows]
    assert expired(manifests, 2, 0, 1) == tuple(folder_name(step) for step in (1, 3, 4, 5))


@given(
    st.sets(st.tuples(st.integers(0, 40), st.integers(1, 3)), max_size=20),
    st.integers(0, 6),
    st.integers(0, 7),
    st.integers(0, 4),
    st.randoms(),
)
def test_laws_of_retention(names: set[tuple[int, int]], last: int, every: int, best: int, chance: object) -> None:
    manifests = [Saved(folder_name(step, part), step, chance.choice([None, 1.0, 2.0])) for step, part in sorted(names)]  # type: ignore[attr-defined]
    going = expired(manifests, last, every, best)
    newest = sorted(manifests, key=lambda one: age_key(one.name))
    assert not {one.name for one in newest[-max(2, last) :]} & set(going)
    assert all(one.name not in going for one in manifests if every and one.step % every == 0)
    assert len(going) >= len(manifests) - max(2, last) - best - sum(
        every > 0 and one.step % every == 0 for one in manifests
    )
    stay = [one for one in manifests if one.name not in going]
    assert expired(stay, last, every, best) == ()  # once is enough
    chance.shuffle(manifests)  # type: ignore[attr-defined]
    assert expired(manifests, last, every, best) == going


def folder(step: int, *others: str, refers: tuple[str, ...] = (), is_whole: bool = True) -> CheckpointFolder:
    name = folder_name(step)
    data = "data-00000-of-00001.safetensors"
    holding = CheckpointFiles(name, step, None, frozenset([data]), frozenset(refers)) if is_whole else None
    return CheckpointFolder(name, (data, *others, *((MANIFEST,) if is_whole else ())), holding)


DATA_1 = "step-00000001/data-00000-of-00001.safetensors"


def test_files_that_others_refer_to_stay_without_their_manifest() -> None:
    folders = [folder(1), folder(2), folder(3, refers=(DATA_1,)), folder(4)]
    what = plan_removal(folders, RetentionPolicy(2), folder_name(4))
    assert what.checkpoints == (folder_name(1), folder_name(2))
    assert what.folders == (folder_name(2),)
    assert what.files == ()
    # Once nobody refers to it any more, the rest goes too.
    rest = [folder(1, is_whole=False), folder(4), folder(5)]
    assert plan_removal(rest, RetentionPolicy(2), folder_name(5)).folders == (folder_name(1),)


def test_only_unfinished_folders_older_than_the_save_go() -> None:
    folders = [folder(1, is_whole=False), folder(2), folder(3, is_whole=False), folder(5, is_whole=False)]
    assert plan_removal(folders, RetentionPolicy(2), folder_name(3)).folders == (folder_name(1),)
    assert plan_removal(folders, RetentionPolicy(2), folder_name(4)).folders == (folder_name(1), folder_name(3))
    assert plan_removal(folders, RetentionPolicy(2), folder_name(4), protected=[folder_name(1)]).folders == (
        folder_name(3),
    )


def test_what_a_killed_commit_left_in_a_checkpoint_goes_and_what_is_not_ours_stays() -> None:
    left = ("part-00000-of-00001.json", "failure-00001-of-00002.json", "data-00007-of-00009.safetensors", "notes.txt")
    what = plan_removal([folder(1, *left), folder(2)], RetentionPolicy(2), folder_name(2))
    assert what.files == tuple(sorted(f"step-00000001/{name}" for name in left[:3]))
    assert what.checkpoints == what.folders == ()


def test_a_damaged_manifest_is_left_for_people_to_look_at() -> None:
    damaged = CheckpointFolder(folder_name(1), ("data-00000-of-00001.safetensors", MANIFEST), None)
    what = plan_removal([damaged, folder(2), folder(3), folder(4)], RetentionPolicy(2), folder_name(4))
    assert what.checkpoints == what.folders == (folder_name(2),)


def test_nothing_is_decided_without_all_manifests() -> None:
    class Unreadable(MemoryStorage):
        def read(self, name: str, start: int = 0, num_bytes: int | None = None) -> bytes:
            if name.endswith(MANIFEST):
                raise StorageError("the connection is lost")
            return super().read(name, start, num_bytes)

    storage = Unreadable()
    for step in range(1, 6):
        storage.files[f"{folder_name(step)}/{MANIFEST}"] = b""
    before = dict(storage.files)
    with pytest.raises(StorageError):
        apply_retention(storage, RetentionPolicy(2), folder_name(5))
    assert storage.files == before


# Sequences of saves, prunes and deaths, with everything that must hold after each.

SAVES = st.fixed_dictionaries(
    {
        "changed": st.sets(st.integers(0, 2)),
        "num_ranks": st.integers(1, 2),
        "is_full": st.booleans(),
        "prune_between": st.booleans(),
        "is_rank_1_missing": st.sampled_from([False, False, False, True]),
        "changes_left": st.none() | st.integers(0, 30),
        "metric": st.none() | st.floats(0, 9),
    }
)
PRUNES = st.builds(RetentionPolicy, st.integers(0, 4), st.integers(0, 3), st.integers(0, 2))
_PLACES = itertools.count()


class World:
    """One place, the saves and prunes on it, and what must be true of it."""

    def __init__(self) -> None:
        self.storage = MemoryStorage()
        self.place = f"sequence-{next(_PLACES)}"
        self.values = [np.full(7, float(number), np.float32) for number in range(3)]
        self.step = 0
        self.expected: dict[str, list[np.ndarray]] = {}
        self.committed: list[str] = []
        self.num_cut_short = 0
        """Of the newest that count, those whose commit was killed: before ``latest`` named them, perhaps."""

    def save(self, plan: dict[str, object]) -> None:
        self.step += 1
        for number in plan["changed"]:  # type: ignore[attr-defined]
            self.values[number] = self.values[number] + self.step
        name = folder_name(self.step)
        self.expected[name] = list(self.values)
        num_ranks = int(plan["num_ranks"])  # type: ignore[call-overload]
        fixed = {"values": {f"w{number}": value for number, value in enumerate(self.values)}}
        where = saving.settings(self.place, keep_last=2, timeout_s=0.001)
        for rank in reversed(range(num_ranks)):
            if rank == 1 and plan["is_rank_1_missing"]:
                continue
            if rank == 0 and plan["prune_between"]:
                self.prune(RetentionPolicy(0))
            if rank == 0 and plan["changes_left"] is not None:
                self.storage.changes_left = plan["changes_left"]  # type: ignore[assignment]
            made = saving.order(self.step, rank, num_ranks, is_full=plan["is_full"], metric=plan["metric"], **fixed)
            try:
                reports = saving.save(made, where)
            except Killed:
                reports = []
            self.storage.changes_left = -1
            is_whole = rank == 0 and "committed" in saving.kinds(reports)
            assert is_whole or plan["changes_left"] is not None or plan["is_rank_1_missing"] or rank == 1, reports
        if name in saving.committed_names(self.storage):
            self.committed.append(name)
            self.num_cut_short = 0 if is_whole else self.num_cut_short + 1

    def prune(self, keep: RetentionPolicy) -> None:
        newest = saving.committed_names(self.storage)[-1:]
        with self.storage.lock("prune"):
            if newest:
                apply_retention(self.storage, keep, newest[0])

    def check(self) -> None:
        present = saving.committed_names(self.storage)
        assert set(self.committed[-2:]) <= set(present)
        for name in present:
            loaded = saving.load(self.storage, name)
            for number, value in enumerate(self.expected[name]):
                np.testing.assert_array_equal(loaded[f"w{number}"], value)
        if "latest" in self.storage.files:
            assert saving.latest_manifest(self.storage).name in self.committed[-1 - self.num_cut_short :]


@pytest.fixture(scope="module")
def in_memory() -> Iterator[dict[str, MemoryStorage]]:
    found: dict[str, MemoryStorage] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(save_tiers, "_opened", lambda place: found[place])
        yield found


@given(steps=st.lists(SAVES | PRUNES, min_size=1, max_size=12))
@example(steps=[RetentionPolicy(2)])
def test_whatever_is_saved_pruned_and_killed_every_checkpoint_stays_loadable(
    in_memory: dict[str, MemoryStorage], steps: list[dict[str, object] | RetentionPolicy]
) -> None:
    in_memory.clear()
    world = World()
    in_memory[world.place] = world.storage
    for step in steps:
        if isinstance(step, RetentionPolicy):
            world.prune(step)
        else:
            world.save(step)
        world.check()
    sound = {"changed": {0, 1, 2}, "num_ranks": 1, "is_full": True, "prune_between": False, "changes_left": None}
    for _ in range(3):
        world.save({**sound, "is_rank_1_missing": False, "metric": None})
        world.check()
    with world.storage.lock("prune"):
        retention.apply_retention(world.storage, RetentionPolicy(2), folder_name(world.step))
    assert len(world.storage.names()) == 3, "two checkpoints and latest: nothing is left of what failed"
