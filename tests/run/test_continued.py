"""A run by epochs that has ended is continued at the very sample where it ended, as often as one likes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from closeranks import Hook, Session
from closeranks.core.errors import CheckpointError
from closeranks.core.events import StepDone
from closeranks.run.job.batch_history import BatchHistory, batch_history_of
from closeranks.run.job.batch_history_lookup import find_batch_history
from closeranks.telemetry.run_log.sample_log import read_samples
from closeranks.testing import run_world
from tests.run.saved import SECTIONS, tensors, tree
from tests.run.small import dataset, of_kind, open_session, train

pytestmark = pytest.mark.usefixtures("alone")


def dropping() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 2))


def go(folder: Path, resume: Path | None = None, hooks: list[Hook] | None = None, **length: Any) -> Any:
    """27 samples by steps of 8: an epoch ends with a step of 3."""
    return train(
        folder,
        model=dropping,
        data=dataset(27),
        hooks=hooks or [],
        train={"steps": None, **length},
        optim={"schedule": {"name": "constant"}},
        loading={"log_samples": True},
        checkpoint={"resume": str(resume) if resume else "", "every": 1, "keep_last": 20},
    )


def sizes(folder: Path) -> list[int]:
    return [done.items for done in of_kind(folder, StepDone)]


def taken(folder: Path) -> Counter[int]:
    """How often each sample was taken; a step that was made again counts once."""
    log = read_samples(folder)
    assert not log.conflicts
    return Counter(sample for step in log.steps for sample in log.samples_of(step))


def assert_same_bits(one: Path, other: Path) -> None:
    for section in SECTIONS:
        left, right = tensors(one, section), tensors(other, section)
        assert left.keys() == right.keys()
        assert all(torch.equal(left[key], right[key]) for key in left), section


def test_it_goes_on_by_epochs_twice_and_then_by_steps(tmp_path: Path) -> None:
    run = tmp_path / "run"
    go(run, epochs=1)
    go(run, run, epochs=2)
    assert sizes(run) == [8, 8, 8, 3, 8, 8, 8, 3]
    assert set(taken(run).values()) == {2}
    result = go(run, run, epochs=3)
    assert result.steps == 12
    assert set(taken(run).values()) == {3}
    assert len(taken(run)) == 27
    assert [done.position for done in of_kind(run, StepDone)][-2:] == [78, 81]
    go(run, run, steps=14)
    assert sizes(run)[-2:] == [8, 8]
    assert tree(run)["progress"] == {"step": 14, "position": 97}
    assert tree(run)["schedule"]["ends"] == [[4, 27], [8, 54], [12, 81]]


class StopsAt(Hook):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, session: Session, done: StepDone) -> None:
        if done.step == self.step:
            session.stop("to be continued")


@pytest.mark.parametrize("length", [{"epochs": 2.5}, {"steps": 9}], ids=["epochs", "steps"])
def test_a_continuation_that_is_broken_off_comes_to_the_same_bits(tmp_path: Path, length: dict[str, float]) -> None:
    go(tmp_path / "first", epochs=1)
    go(tmp_path / "whole", tmp_path / "first", **length)
    go(tmp_path / "halves", tmp_path / "first", [StopsAt(6)], **length)
    assert tree(tmp_path / "halves")["progress"]["step"] < 9
    go(tmp_path / "halves", tmp_path / "halves", **length)
    assert tree(tmp_path / "halves")["progress"] == tree(tmp_path / "whole")["progress"]
    assert_same_bits(tmp_path / "halves", tmp_path / "whole")


def test_a_fallback_to_an_older_checkpoint_repeats_the_short_step_as_it_was(tmp_path: Path) -> None:
    """The newest one is damaged: what is trained again ends where it ended before."""
    run, other = tmp_path / "run", tmp_path / "other"
    for folder in (run, other):
        go(folder, epochs=1)
    (data,) = (run / "checkpoints" / "step-00000004").glob("data-*")
    data.write_bytes(data.read_bytes()[:-40] + bytes(40))
    go(run, run, epochs=2)
    go(other, other, epochs=2)
    assert len(sizes(run)) > 8, "some steps were made again"
    assert sizes(run)[-5:] == [3, 8, 8, 8, 3]
    assert set(taken(run).values()) == {2}
    assert_same_bits(run, other)


def test_a_micro_batch_that_the_job_names_counts(tmp_path: Path) -> None:
    go(tmp_path / "run", epochs=1, micro_batch=2)
    session = open_session(
        tmp_path / "run",
        model=dropping,
        data=dataset(27),
        train={"steps": None, "epochs": 2, "micro_batch": 4},
        checkpoint={"resume": str(tmp_path / "run")},
    )
    with session:
        assert session.context.schedule.micro_batch == 4


def test_what_is_done_is_said_to_be_done(tmp_path: Path) -> None:
    go(tmp_path / "run", epochs=1)
    for epochs in (1, 0.5):
        with pytest.raises(CheckpointError, match=r"after 1 epochs. Set train.epochs to more than 1\."):
            go(tmp_path / "run", tmp_path / "run", epochs=epochs)
    with pytest.raises(CheckpointError, match=r"Set train.steps to more than 4\."):
        go(tmp_path / "run", tmp_path / "run", steps=4)


def test_forged_words_of_a_state_say_nothing() -> None:
    sound = {
        "identity": {"global_batch": 8},
        "progress": {"step": 4, "position": 27},
        "schedule": {"micro_batch": 2, "ends": []},
        "config": {"train": {"micro_batch": 0}},
    }
    assert batch_history_of(sound, 8) == BatchHistory(((4, 27),), 2)
    for change in (
        {"progress": None},
        {"progress": {"step": "x", "position": 1}},
        {"schedule": {"micro_batch": 9, "ends": []}},
        {"schedule": {"micro_batch": 2, "ends": [[1]]}},
        {"schedule": {"micro_batch": 2, "ends": 3}},
        {"schedule": {"micro_batch": -1, "ends": []}},
        {"schedule": []},
        {"identity": {"global_batch": 16}},
    ):
        assert batch_history_of({**sound, **change}, 8) == BatchHistory()
    assert batch_history_of({}, 8) == BatchHistory()


def test_a_place_without_a_state_has_no_past(tmp_path: Path) -> None:
    with open_session(tmp_path / "run", checkpoint={"resume": "auto"}) as session:
        assert find_batch_history(session.job, tmp_path / "run") == BatchHistory()
        other = session.job.model_copy(
            update={"checkpoint": session.job.checkpoint.model_copy(update={"resume": str(tmp_path / "none")})}
        )
        assert find_batch_history(other, tmp_path / "run") == BatchHistory()


def _continue(folder: str) -> list[int]:
    return [go(Path(folder), Path(folder), epochs=2).steps]


@pytest.mark.world
def test_two_ranks_that_somebody_else_started_agree_on_it(tmp_path: Path) -> None:
    """As under torchrun: rank 0 looks, and both build the same schedule."""
    go(tmp_path / "run", epochs=1)
    assert run_world(_continue, 2, str(tmp_path / "run")) == [[8], [8]]
    assert sizes(tmp_path / "run")[-4:] == [8, 8, 8, 3]
    assert set(taken(tmp_path / "run").values()) == {2}
