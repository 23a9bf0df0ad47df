"""A session saves while it trains: at the right steps, without changing a bit, and whatever befalls the disk."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from closeranks import Hook, Session
from closeranks.checkpoint.reader import CheckpointReader, open_newest
from closeranks.checkpoint.storage.open import open_storage
from closeranks.core.events import Resumed, Saved, SaveFailed, Warned
from closeranks.facts.layout import Layout
from closeranks.run.job import load_job
from closeranks.run.loop import drive
from closeranks.telemetry.recorder import read_events
from closeranks.testing import run_world
from tests.run.saved import tensors, tree
from tests.run.small import events, open_session, train
from tests.run.test_matrix import TABLES

STEPS = 8


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").glob("step-*"))


class Slow(Hook):
    """Waits for each save before the next step, so that none is missed for want of time."""

    def on_step(self, session: Session, step: Any) -> None:
        for saver in session._saving._savers.values():
            for report in saver.wait(60):
                session._saving._hear(saver, report)


def go(folder: Path, layout: str, checkpoint: dict[str, Any], steps: int = STEPS) -> list[float]:
    """A run of the matrix's model; its losses."""
    torch.set_num_threads(1)
    tables = {
        **TABLES,
        "train": {**TABLES["train"], "steps": steps},
        "layout": asdict(Layout.parse(layout)),
        "checkpoint": checkpoint,
    }
    drive(Session.from_job(load_job(None, extra=tables).value, folder, [Slow()]))
    return [
        event.loss
        for _, event in read_events(folder / "metrics" / "rank-00000.jsonl")
        if event and event.name == "step"
    ]


@pytest.mark.world
@pytest.mark.parametrize("layout", ["data=3", "data=3 zero=3"])
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
    from tests.run.small import dataset

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
    assert any(isinstance(event, Warned) and "step-00000006 was passed over" in event.what for event in heard)


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
