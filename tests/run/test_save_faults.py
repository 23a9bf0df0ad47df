"""Disks that fail while a job trains: it goes on, says so, and the next save succeeds. The faults are real: read-only,
broken, frozen and full file systems, one of them full for a single rank alone."""

from __future__ import annotations

import ctypes
import fcntl
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from closeranks import Hook, Session
from closeranks.checkpoint.load.resharding_reader import open_newest
from closeranks.core.errors import SetupError
from closeranks.core.events import Saved, SaveFailed, StepDone
from closeranks.core.system import fallback_folders
from closeranks.facts.layout import Layout
from closeranks.run.job.job import load_job
from closeranks.run.loop import run_session
from closeranks.testing import run_world
from tests.checkpoint.test_write_faults import _FIFREEZE, _FITHAW, disk, tmpfs
from tests.checkpoint.test_write_faults import run as command
from tests.run.small import events, of_kind, train
from tests.run.state.test_session_checkpoints import Slow
from tests.run.test_matrix import TABLES

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounting file systems needs root")
Acts = Mapping[int, Callable[[], object]]
_CLONE_NEWNS = 0x00020000


class At(Hook):
    """Does something to the disk after some steps."""

    def __init__(self, acts: Acts) -> None:
        self._acts = acts

    def on_step(self, session: Session, step: StepDone) -> None:
        if step.step in self._acts:
            self._acts[step.step]()


def steps(run: Path, kind: type[Saved] | type[SaveFailed], rank: int = 0) -> list[int]:
    return [event.step for event in of_kind(run, kind, rank)]


def assert_went_on(run: Path, place: Path, word: str, num_steps: int = 8) -> None:
    """Every step was taken; of saves after every second one, the second failed, was told of, and the next succeeded."""
    assert steps(run, SaveFailed) == [4]
    (failed,) = of_kind(run, SaveFailed)
    assert word in failed.what.lower()
    assert (failed.rank, failed.tier) == (0, "primary")
    assert steps(run, Saved) == [2, 6, 8]
    assert [event.step for event in of_kind(run, StepDone)] == list(range(1, num_steps + 1))
    reader = open_newest(str(place))
    reader.check_files()
    assert reader.manifest.step == num_steps


def settings(place: Path, **changes: Any) -> dict[str, Any]:
    return {"every": 2, "folder": str(place), "keep_last": 2, **changes}


@pytest.mark.usefixtures("alone")
def test_a_disk_that_becomes_read_only(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with tmpfs(tmp_path / "disk", "8m") as place:
        acts = {n: lambda how=how: command("mount", "-o", f"remount,{how}", place) for n, how in ((3, "ro"), (5, "rw"))}
        train(run, hooks=[Slow(), At(acts)], train={"steps": 8}, checkpoint=settings(place / "saved"))
        assert_went_on(run, place / "saved", "read-only")


@pytest.mark.usefixtures("alone")
def test_a_disk_that_breaks_and_is_replaced(tmp_path: Path) -> None:
    run, place = tmp_path / "run", tmp_path / "disk"
    with ExitStack() as first, ExitStack() as second:
        memory = first.enter_context(disk(place))

        def replace() -> None:
            first.close()
            second.enter_context(disk(place))

        acts: Acts = {3: lambda: fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE), 5: replace}
        train(run, hooks=[Slow(), At(acts)], train={"steps": 8}, checkpoint=settings(place / "saved"))
        assert_went_on(run, place / "saved", "input/output error")


@contextmanager
def handle_of(folder: Path) -> Iterator[int]:
    """Of a disk's root, to freeze it by; thawed at the end in any case, or it could never be unmounted."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        yield handle
    finally:
        with suppress(OSError):  # it was thawed as it should be
            fcntl.ioctl(handle, _FITHAW, 0)
        os.close(handle)


class Frozen(Hook):
    """The disk stands still from one step to another; before and after that every save is waited for."""

    def __init__(self, handle: int, first: int, last: int) -> None:
        self._handle, self._first, self._last = handle, first, last
        self._patient = Slow()

    def on_step(self, session: Session, step: StepDone) -> None:
        if step.step == self._last:
            fcntl.ioctl(self._handle, _FITHAW, 0)
        if not self._first < step.step < self._last:
            self._patient.on_step(session, step)
        if step.step == self._first:
            fcntl.ioctl(self._handle, _FIFREEZE, 0)


class Impatient(Hook):
    """The disk stands still from step 3 to step 5, and only then is a silent writer given up soon: however busy the
    machine is, a healthy one has its usual time."""

    def __init__(self, handle: int) -> None:
        self._handle, self._usual_s = handle, 0.0

    def on_step(self, session: Session, step: StepDone) -> None:
        saver = session._capture.checkpoints._saver
        assert saver is not None
        if step.step == 3:
            fcntl.ioctl(self._handle, _FIFREEZE, 0)
            self._usual_s, saver._client._patience_s = saver._client._patience_s, 0.3
        elif step.step == 5:
            fcntl.ioctl(self._handle, _FITHAW, 0)
            saver._client._patience_s = self._usual_s


@pytest.mark.usefixtures("alone")
def test_a_disk_that_stands_still_for_a_while_costs_no_step(tmp_path: Path) -> None:
    """The save that hung is done late, and counts; those that fell due meanwhile are not begun."""
    run, place = tmp_path / "run", tmp_path / "disk"
    with disk(place), handle_of(place) as handle:
        hooks = [Frozen(handle, 3, 9)]
        train(run, hooks=hooks, train={"steps": 12}, checkpoint=settings(place / "saved"))
        assert steps(run, SaveFailed) == []
        assert steps(run, Saved) == [2, 4, 10, 12]
        heard = [(type(event), getattr(event, "step", None)) for event in events(run)]
        assert heard.index((StepDone, 9)) < heard.index((Saved, 4)), "it trained while the disk stood still"
        assert open_newest(str(place / "saved")).manifest.step == 12


@pytest.mark.usefixtures("alone")
def test_a_disk_that_stands_still_too_long_fails_the_save(tmp_path: Path) -> None:
    """The writer in its grip is given up, cannot be ended, and does no harm when the disk moves again."""
    run, place = tmp_path / "run", tmp_path / "disk"
    with disk(place), handle_of(place) as handle:
        train(run, hooks=[Slow(), Impatient(handle)], train={"steps": 8}, checkpoint=settings(place / "saved"))
        assert_went_on(run, place / "saved", "no heartbeat")


def in_own_mounts() -> None:
    """From here on what this process mounts is seen by it and its children alone."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "unshare")
    command("mount", "--make-rprivate", "/")


def go_with_one_full(folder: Path, place: Path, full: str) -> None:
    """Two ranks; after step 3 rank 1 alone finds no room at the place, after step 5 it does again."""
    torch.set_num_threads(1)
    acts: Acts = {}
    if dist.get_rank() == 1:
        in_own_mounts()
        acts = {
            3: lambda: command("mount", "-t", "tmpfs", "-o", full, "tmpfs", place),
            5: lambda: command("umount", "-l", place),
        }
    tables = {
        **TABLES,
        "train": {**TABLES["train"], "steps": 8},
        "layout": asdict(Layout.parse("data=2 zero=3")),
        "checkpoint": settings(place, timeout_s=6.0),  # rank 0 waits so long for a part that does not come
    }
    run_session(Session.from_job(load_job(None, extra=tables).value, folder, [Slow(), At(acts)]))


@pytest.mark.world
@pytest.mark.parametrize(
    ("full", "word"),
    [("nr_inodes=2", "no space"), pytest.param("size=4k", "free", marks=pytest.mark.slow)],
    ids=["no file can be made", "no room"],
)
def test_a_disk_that_is_full_for_one_rank_alone(tmp_path: Path, full: str, word: str) -> None:
    """The other rank's part counts for nothing then, and both say so."""
    run, place = tmp_path / "run", tmp_path / "saved"
    place.mkdir()
    run_world(go_with_one_full, 2, run, place, full)
    assert_went_on(run, place, "rank 1")
    (failed,) = of_kind(run, SaveFailed, rank=1)
    assert (failed.step, failed.rank) == (4, 1)
    assert word in failed.what
    assert not (place / "step-00000004").exists(), "nothing of the failed one is left"


@pytest.fixture
def spare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only other place for a state."""
    (tmp_path / "spare").mkdir()
    monkeypatch.setattr(fallback_folders, "fallback_roots", lambda: (str(tmp_path / "spare"),))
    return tmp_path / "spare"


@pytest.mark.usefixtures("alone")
def test_the_last_state_of_a_run_is_saved_elsewhere_and_said_where(tmp_path: Path, spare: Path) -> None:
    even = {"schedule": {"name": "constant", "warmup": 0}}
    train(tmp_path / "calm", train={"steps": 8}, optim=even)
    with tmpfs(tmp_path / "disk", "8m") as place:
        acts: Acts = {2: lambda: command("mount", "-o", "remount,ro", place)}
        how = {"every": 0, "folder": str(place / "saved")}
        with pytest.raises(SetupError, match="read-only") as caught:
            train(tmp_path / "run", hooks=[At(acts)], train={"steps": 4}, optim=even, checkpoint=how)
    (refuge,) = spare.iterdir()
    assert f"The state of step 4 is in {refuge}/step-00000004 instead. Resume via checkpoint.resume={refuge}." in str(
        caught.value
    )
    (saved,) = of_kind(tmp_path / "run", Saved)
    assert saved.path == f"{refuge}/step-00000004"
    train(tmp_path / "again", train={"steps": 8}, optim=even, checkpoint={"resume": str(refuge)})
    states = [open_newest(str(tmp_path / name)).manifest for name in ("calm", "again")]
    assert states[0].digests() == states[1].digests()


@pytest.mark.usefixtures("alone")
def test_where_no_place_has_room_nothing_is_left_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tmpfs(tmp_path / "disk", "8m") as place, tmpfs(tmp_path / "small", "4k") as small:
        monkeypatch.setattr(fallback_folders, "fallback_roots", lambda: (str(small),))
        acts: Acts = {2: lambda: command("mount", "-o", "remount,ro", place)}
        with pytest.raises(SetupError, match="the previous checkpoint is still valid"):
            train(tmp_path / "run", hooks=[At(acts)], checkpoint={"every": 0, "folder": str(place / "saved")})
        assert list(small.iterdir()) == []


@pytest.mark.usefixtures("alone")
def test_what_the_second_place_holds_is_saved(tmp_path: Path, spare: Path) -> None:
    """The first one cannot be written: that was told, and is no reason to fail."""
    with tmpfs(tmp_path / "disk", "8m") as place:
        acts: Acts = {2: lambda: command("mount", "-o", "remount,ro", place)}
        how = {"every": 0, "folder": str(place / "saved"), "remote": str(tmp_path / "far")}
        train(tmp_path / "run", hooks=[At(acts)], train={"steps": 4}, checkpoint=how)
    assert open_newest(str(tmp_path / "far")).manifest.step == 4
    assert [event.tier for event in of_kind(tmp_path / "run", Saved)] == ["remote"]
    assert [(event.step, event.tier) for event in of_kind(tmp_path / "run", SaveFailed)] == [(4, "primary")]
    assert list(spare.iterdir()) == []
