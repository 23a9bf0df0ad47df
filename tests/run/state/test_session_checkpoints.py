"""A session saves while it trains: at the right steps, without changing a bit, and whatever befalls the disk."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from closeranks import Hook, Session
from closeranks.checkpoint.load.catalogue import find_checkpoints
from closeranks.checkpoint.load.resharding_reader import CheckpointReader, open_newest
from closeranks.core.errors import BadRecordError, CheckpointError, DataError
from closeranks.core.events import Resumed, Saved, SaveFailed, Warned
from closeranks.facts.layout import Layout
from closeranks.run.job.job import load_job
from closeranks.run.loop import run_session
from closeranks.storage.open import open_storage
from closeranks.telemetry.run_log.recorder import read_events
from closeranks.testing import run_world
from tests.run.saved import tensors, tree
from tests.run.small import dataset, events, of_kind, open_session, train
from tests.run.test_matrix import TABLES

STEPS = 8


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").glob("step-*"))


class Slow(Hook):
    """Waits for each save before the next step, so that none is missed for want of time."""

    def on_step(self, session: Session, step: Any) -> None:
        saver = session._capture.checkpoints._saver
        for report in saver.wait(60) if saver is not None else ():
            session._capture.checkpoints._on_report(report)


def go(folder: Path, layout: str, checkpoint: dict[str, Any], steps: int = STEPS) -> list[float]:
    """A run of the matrix's model; its losses."""
    torch.set_num_threads(1)
    tables = {
        **TABLES,
        "train": {**TABLES["train"], "steps": steps},
        "layout": asdict(Layout.parse(layout)),
        "checkpoint": checkpoint,
    }
    run_session(Session.from_job(load_job(None, extra=tables).value, folder, [Slow()]))
    return [
        event.loss
        for _, event in read_events(folder / "metrics" / "rank-00000.jsonl")
        if event and event.name == "step"
    ]


@pytest.mark.world
@pytest.mark.parametrize("layout", [pytest.param("data=3", marks=pytest.mark.slow), "data=3 zero=3"])
def test_going_on_from_a_checkpoint_taken_during_training_is_bit_identical(tmp_path: Path, layout: str) -> None:
    """Dropout, accumulation and three data ranks; saving changes nothing either."""
    size = Layout.parse(layout).num_ranks
    quiet = run_world(go, size, tmp_path / "quiet", layout, {"save": False})[0]
    saving = run_world(go, size, tmp_path / "saving", layout, {"every": 3, "keep_last": 9})[0]
    assert saving == quiet
    assert names(tmp_path / "saving") == ["step-00000003", "step-00000006", "step-00000008"]
    middle = str(tmp_path / "saving" / "checkpoints" / "step-00000003")
    again = run_world(go, size, tmp_path / "again", layout, {"resume": middle, "every": 0})[0]
    assert again == quiet[3:]
    ours, theirs = (open_newest(str(tmp_path / run)).manifest.digests() for run in ("saving", "again"))
    assert ours == theirs, "every weight and moment at the end"


@pytest.mark.world
def test_every_rank_writes_its_share(tmp_path: Path) -> None:
    """Three ranks that hold the same: what each writes is about a third."""
    run_world(wide, 3, tmp_path / "run")
    manifest = open_newest(str(tmp_path / "run")).manifest
    sizes = [file.num_bytes for file in manifest.files]
    assert len(sizes) == 3
    assert max(sizes) < 1.3 * sum(sizes) / 3


def wide(folder: Path) -> None:
    torch.set_num_threads(1)
    layers = (nn.Linear(4, 3000), nn.Linear(3000, 500), nn.Linear(500, 2))
    train(folder, model=lambda: nn.Sequential(*layers), train={"micro_batch": 1})


@pytest.mark.usefixtures("alone")
def test_a_session_saves_as_often_as_it_is_told_and_keeps_what_it_is_told(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(run, hooks=[Slow()], train={"steps": 10}, checkpoint={"every": 2, "keep_last": 2, "keep_every": 4})
    assert names(run) == ["step-00000004", "step-00000008", "step-00000010"]
    saved = [event for event in events(run) if isinstance(event, Saved)]
    assert [event.step for event in saved] == [2, 4, 6, 8, 10]
    assert all(event.bytes > 0 and event.seconds > 0 for event in saved)
    assert tree(run)["progress"] == {"step": 10, "position": 80}


@pytest.mark.usefixtures("alone")
def test_the_best_evaluated_states_are_kept(tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = {"every": 0, "keep_last": 2, "keep_best": 1}
    train(
        run,
        hooks=[Slow()],
        eval_data=dataset(16, seed=3),
        train={"steps": 12, "eval_every": 2},
        optim={"lr": 0.5},
        checkpoint=settings,
    )
    losses = {event.step: event.loss for event in events(run) if event.name == "eval"}
    best = min(losses, key=lambda step: losses[step])
    assert f"step-{best:08d}" in names(run)


@pytest.mark.usefixtures("alone")
def test_the_best_state_is_kept_also_where_a_save_was_due_at_its_step(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(
        run,
        hooks=[Slow()],
        eval_data=dataset(16, seed=3),
        train={"steps": 12, "eval_every": 2},
        optim={"lr": 0.5},
        checkpoint={"every": 2, "keep_last": 2, "keep_best": 1},
    )
    losses = {event.step: event.loss for event in events(run) if event.name == "eval"}
    best = min(losses, key=lambda step: losses[step])
    assert f"step-{best:08d}" in names(run)
    assert find_checkpoints(str(run)).found[0].manifest is not None
    assert all(found.manifest.metric is not None for found in find_checkpoints(str(run)) if found.manifest)


@pytest.mark.usefixtures("alone")
def test_an_evaluation_that_is_no_number_is_not_the_best(tmp_path: Path) -> None:
    from closeranks.core.events import Evaluated

    with open_session(tmp_path / "run", checkpoint={"keep_best": 1, "every": 0}) as session:
        session._capture.checkpoints.on_eval(Evaluated(step=1, loss=float("nan")))
        assert session._capture.checkpoints._saved_step == -1
        session._capture.checkpoints.on_eval(Evaluated(step=2, loss=3.0))
        assert session._capture.checkpoints._saved_step == 2


@pytest.mark.usefixtures("alone")
def test_a_run_that_a_hook_stops_while_a_save_is_due_was_not_drained(tmp_path: Path) -> None:
    class Stop(Hook):
        def on_step(self, session: Session, step: Any) -> None:
            session.stop("enough")

    assert train(tmp_path / "run", hooks=[Stop()], train={"steps": 9}, checkpoint={"every": 1}).reason == "stopped"


@pytest.mark.usefixtures("alone")
def test_saving_elsewhere_leaves_nothing_open(tmp_path: Path) -> None:
    with open_session(tmp_path / "run", checkpoint={"save": False}) as session:
        session.save(tmp_path / "first")
        before = threading.active_count(), len(os.listdir("/proc/self/fd"))
        for number in range(5):
            session.save(tmp_path / str(number))
        assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == before


class Shoot(Hook):
    """Holds rank 1's writer before a save and kills it with the save in hand; gives every step some time."""

    def on_step(self, session: Session, step: Any) -> None:
        time.sleep(0.03)
        saver = session._capture.checkpoints._saver
        assert saver is not None
        if session.world.rank == 1 and step.step in (9, 12):
            while (process := saver._client._process) is None:
                time.sleep(0.01)
            process.send_signal(signal.SIGSTOP if step.step == 9 else signal.SIGKILL)


@pytest.mark.world
def test_a_save_that_failed_on_another_rank_is_tried_again_once(tmp_path: Path) -> None:
    """Not at every step from then on: the rank that asked has what it wanted when all take a save."""
    num_taken = run_world(shot, 2, tmp_path / "run")
    assert len(set(num_taken)) == 1, "all ranks took the same ones"
    assert num_taken[0] <= 11, "at most six that were due, the end, and what was tried again"
    assert of_kind(tmp_path / "run", SaveFailed, 1), "and it was told"


def shot(folder: Path) -> int:
    from closeranks.checkpoint.save import save_schedule

    torch.set_num_threads(1)
    save_schedule.FIRST_RETRY_S = 0.1
    checkpoint = {"every": 10, "keep_last": 50}
    with open_session(folder, hooks=[Shoot()], train={"steps": 60}, checkpoint=checkpoint) as session:
        for step in session:
            step.run()
        assert session._capture.checkpoints._saver is not None
        return session._capture.checkpoints._saver._num_saves


@pytest.mark.usefixtures("alone")
def test_what_does_not_change_is_written_once(tmp_path: Path) -> None:
    """A frozen half: later checkpoints refer to the first one's bytes, and still load whole."""
    run = tmp_path / "run"
    train(
        run,
        model=lambda: nn.Sequential(nn.Linear(4, 4096), nn.Linear(4096, 2)),
        hooks=[Slow()],
        train={"steps": 6},
        optim={"lr": 1e-2, "groups": [{"pattern": "0.*", "frozen": True}]},
        checkpoint={"every": 2, "keep_last": 2, "full_every": 10},
    )
    newest = open_newest(str(run)).manifest
    frozen = [entry for entry in newest.entries if entry.chunk.key.startswith("0.")]
    trained = [entry for entry in newest.entries if not entry.chunk.key.startswith("0.")]
    assert frozen
    assert all(entry.file.startswith("step-00000002/") for entry in frozen)
    assert all("/" not in entry.file for entry in trained)
    assert names(run) == ["step-00000002", "step-00000004", "step-00000006"], "the base stays while it is needed"
    assert tensors(run, "model")["0.weight"].shape == (4096, 4)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with 2 MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    place = tmp_path / "disk"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", place], check=True)
    yield place
    subprocess.run(["umount", "-l", place], check=True)


class Crowd(Hook):
    """Fills the disk after a step, and clears it after a later one."""

    def __init__(self, disk: Path, fill: int, clear: int) -> None:
        self._disk, self._fill, self._clear = disk, fill, clear

    def on_step(self, session: Session, step: Any) -> None:
        crowd = self._disk / "crowd"
        if step.step == self._fill:
            room = os.statvfs(self._disk)
            crowd.write_bytes(b"x" * (room.f_bavail * room.f_bsize))
        if step.step == self._clear:
            crowd.unlink()


@pytest.mark.usefixtures("alone")
def test_a_full_disk_does_not_stop_training_and_the_next_save_succeeds(tmp_path: Path, small_disk: Path) -> None:
    run = tmp_path / "run"
    checkpoint = {"every": 2, "folder": str(small_disk / "checkpoints"), "keep_last": 2}
    result = train(run, hooks=[Slow(), Crowd(small_disk, 3, 5)], train={"steps": 8}, checkpoint=checkpoint)
    assert result.steps == 8
    failed = [event for event in events(run) if isinstance(event, SaveFailed)]
    assert [event.step for event in failed] == [4]
    assert "full" in failed[0].what
    assert [event.step for event in events(run) if isinstance(event, Saved)] == [2, 6, 8]
    assert open_newest(str(small_disk / "checkpoints")).manifest.step == 8


@pytest.mark.usefixtures("alone")
def test_a_damaged_newest_checkpoint_is_passed_over_with_a_word(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(run, hooks=[Slow()], train={"steps": 6}, checkpoint={"every": 2, "keep_last": 9})
    flip(next((run / "checkpoints" / "step-00000006").glob("data-*")), -20)
    with open_session(tmp_path / "next", train={"steps": 8}, checkpoint={"resume": str(run)}) as session:
        assert session.num_done == 4
        for step in session:
            step.run()
    heard = list(events(tmp_path / "next"))
    assert any(isinstance(event, Resumed) and event.path.endswith("step-00000004") for event in heard)
    assert any(isinstance(event, Warned) and "step-00000006 was skipped" in event.what for event in heard)


def tear(checkpoint: Path) -> None:
    next(checkpoint.glob("data-*")).write_bytes(b"torn")


def lose(checkpoint: Path) -> None:
    next(checkpoint.glob("data-*")).unlink()


def never_commit(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").unlink()


def replace_by_another(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").write_text('{"format": "of somebody else"}\n')


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("harm", [tear, lose, never_commit, replace_by_another])
def test_whatever_befell_the_newest_the_one_before_it_serves(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    run = tmp_path / "run"
    train(run, hooks=[Slow()], train={"steps": 4}, checkpoint={"every": 2})
    harm(run / "checkpoints" / "step-00000004")
    with open_session(tmp_path / "next", train={"steps": 5}, checkpoint={"resume": str(run)}) as session:
        assert session.num_done == 2


@pytest.mark.usefixtures("alone")
def test_one_that_was_named_is_refused_when_it_is_damaged(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(run, hooks=[Slow()], train={"steps": 4}, checkpoint={"every": 2})
    named = run / "checkpoints" / "step-00000004"
    tear(named)
    with pytest.raises(CheckpointError, match="step-00000004"):
        open_session(tmp_path / "next", train={"steps": 5}, checkpoint={"resume": str(named)})


@pytest.mark.usefixtures("alone")
def test_a_run_starts_from_given_weights(tmp_path: Path) -> None:
    """The weights alone: step 0, a fresh optimizer, and other data would do as well."""
    train(tmp_path / "first", train={"steps": 4})
    wanted = tensors(tmp_path / "first", "model")
    with open_session(tmp_path / "next", checkpoint={"weights": str(tmp_path / "first")}) as session:
        assert session.num_done == 0
        held = session.model.state_dict()
        assert held.keys() == wanted.keys()
        assert all(torch.equal(held[name], tensor) for name, tensor in wanted.items())
        for step in session:
            step.run()
    assert [event.step for event in events(tmp_path / "next") if isinstance(event, Resumed)] == [0]


@pytest.mark.world
def test_all_ranks_pass_over_what_one_of_them_cannot_read(tmp_path: Path) -> None:
    """Only what rank 1 wrote is damaged: under ZeRO-3 the others would read their own parts without a word."""
    layout, run = "data=3 zero=3", tmp_path / "run"
    whole = run_world(go, 3, run, layout, {"every": 3, "keep_last": 9})[0]
    flip(run / "checkpoints" / "step-00000008" / "data-00001-of-00003.safetensors", -8)
    again = run_world(go, 3, tmp_path / "again", layout, {"resume": str(run), "every": 0}, STEPS + 1)[0]
    assert len(again) == 3, "from step 6"
    assert again[:2] == whole[6:]


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.usefixtures("alone")
def test_resume_auto_starts_anew_and_goes_on(tmp_path: Path) -> None:
    run = tmp_path / "run"
    auto = {"resume": "auto"}
    assert train(run, train={"steps": 3}, checkpoint=auto).steps == 3
    with open_session(run, train={"steps": 5}, checkpoint=auto) as session:
        assert session.num_done == 3
        assert session.folder == run
        for step in session:
            step.run()
    assert names(run) == ["step-00000003", "step-00000005-2"]
    assert train(run, train={"steps": 5}, checkpoint=auto).reason == "finished", (
        "nothing is left to do, which is no error"
    )
    assert names(run) == ["step-00000003", "step-00000005-2"]


@pytest.mark.usefixtures("alone")
def test_two_tiers_hold_the_same(tmp_path: Path) -> None:
    run, remote = tmp_path / "run", tmp_path / "store"
    checkpoint = {"every": 2, "remote": str(remote), "remote_every": 2}
    train(run, hooks=[Slow()], train={"steps": 8}, checkpoint=checkpoint)
    far = CheckpointReader(open_storage(str(remote)), "step-00000008")
    near = CheckpointReader(open_storage(str(run / "checkpoints")), "step-00000008")
    assert far.manifest.digests() == near.manifest.digests()
    assert not (remote / "step-00000004").exists() or (remote / "step-00000002").exists()
    tiers = [(event.step, event.tier) for event in events(run) if isinstance(event, Saved)]
    assert ("remote") in {tier for _, tier in tiers}
    for path in (run / "checkpoints").iterdir():  # the fast tier is lost with its machine
        subprocess.run(["rm", "-r", str(path)], check=True)
    with open_session(run, train={"steps": 9}, checkpoint={"resume": "auto", "remote": str(remote)}) as session:
        assert session.num_done == 8


class Spoiled(list[Any]):
    """Evaluation data whose samples cannot be read."""

    def __getitem__(self, index: Any) -> Any:
        raise BadRecordError(f"sample {index} is torn")


@pytest.mark.usefixtures("alone")
def test_bad_evaluation_data_at_the_end_does_not_cost_the_state(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(DataError, match="torn"):
        train(run, eval_data=Spoiled(dataset(16)))
    assert names(run) == ["step-00000004"]
    assert tree(run)["progress"]["step"] == 4
    assert train(run, checkpoint={"resume": "auto"}, train={"steps": 6}).steps == 6


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("keep_best", "order"), [(0, ["saved", "eval"]), (1, ["eval", "saved"])])
def test_only_where_the_best_are_kept_does_the_last_save_wait_for_its_judgement(
    tmp_path: Path, keep_best: int, order: list[str]
) -> None:
    train(tmp_path / "run", eval_data=dataset(16), checkpoint={"every": 0, "keep_best": keep_best})
    assert [event.name for event in events(tmp_path / "run") if event.name in order] == order
    (found,) = find_checkpoints(str(tmp_path / "run"))
    assert found.manifest is not None
    assert (found.manifest.metric is not None) is bool(keep_best)
