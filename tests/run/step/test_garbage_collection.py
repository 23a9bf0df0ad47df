"""The garbage collector is held off the steps, runs at their boundaries, and is given back as it was."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from closeranks import Hook, Session
from closeranks.core.events import StepDone
from closeranks.run.step.garbage_collection import GarbageCollection
from tests.run.small import counted, open_session, train


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.enable()
    gc.freeze()


def test_what_somebody_else_froze_stays_frozen() -> None:
    gc.freeze()
    before = gc.get_freeze_count()
    pause = GarbageCollection(every=10)
    pause.disable()
    pause.enable()
    assert 0.9 * before < gc.get_freeze_count() <= before, "some are freed as their last user lets go of them"
    assert gc.isenabled()


def test_it_is_held_and_given_back() -> None:
    pause = GarbageCollection(every=10)
    pause.disable()
    assert not gc.isenabled()
    assert gc.get_freeze_count() > 0
    pause.enable()
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_whoever_had_switched_it_off_finds_it_off() -> None:
    gc.disable()
    pause = GarbageCollection(every=10)
    pause.disable()
    pause.enable()
    assert not gc.isenabled()


def test_releasing_what_was_not_held_changes_nothing() -> None:
    GarbageCollection(every=10).enable()
    assert gc.isenabled()


class Ring:
    """Only the collector can free it."""

    def __init__(self) -> None:
        self.itself = self


def test_it_runs_at_every_so_many_boundaries() -> None:
    pause = GarbageCollection(every=3)
    pause.disable()
    freed = []
    for step in range(1, 7):
        ring = weakref.ref(Ring())
        pause.run(step)
        freed.append(ring() is None)
    pause.enable()
    assert freed == [False, False, True, False, False, True]


@pytest.mark.usefixtures("alone")
def test_no_collection_happens_inside_a_step(tmp_path: Path) -> None:
    running: list[bool] = []

    def watched(model: Any, batch: Any) -> Any:
        running.append(gc.isenabled())
        return counted(model, batch)

    train(tmp_path, loss=watched, metrics=["accuracy"])
    assert running == [False] * 8
    assert gc.isenabled()


@pytest.mark.usefixtures("alone")
def test_it_comes_back_when_a_run_fails(tmp_path: Path) -> None:
    class Fails(Hook):
        def on_step(self, session: Session, step: StepDone) -> None:
            raise KeyError

    with pytest.raises(Exception, match="KeyError"):
        train(tmp_path, hooks=[Fails()])
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


@pytest.mark.usefixtures("alone")
def test_it_is_not_held_before_the_first_step(tmp_path: Path) -> None:
    with open_session(tmp_path):
        assert gc.isenabled()
