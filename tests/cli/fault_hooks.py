"""Hooks that jobs of fault tests name: they order what happens by steps and saves, never by time."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from closeranks import Hook, Session
from closeranks.checkpoint.format.manifest import MANIFEST, part_name
from closeranks.checkpoint.save.writer_client import WriterClient
from closeranks.core.system import failpoints
from closeranks.core.system.environment import detect_world

PATIENCE_S = 200.0


STAND_AT = "CLOSERANKS_TEST_STAND_AT"
DIE_AT = "CLOSERANKS_TEST_DIE_AT"


class Patient(Hook):
    """Waits for each save before the next step, so that none is missed for want of time."""

    def on_step(self, session: Session, step: Any) -> None:
        saver = session._capture.checkpoints._saver
        for report in saver.wait(PATIENCE_S) if saver is not None else ():
            session._capture.checkpoints._on_report(report)


class Unhurried(Hook):
    """Steps long enough for somebody outside to tell one from the next, however busy the machine is."""

    def on_step(self, session: Session, step: Any) -> None:
        time.sleep(0.1)


class WritersDie(Patient):
    """What the environment wants dead are writers only, and only up to a step; then the run is asked to stop.

    The trainer passes the same points in its last save, and must live. How each writer ended is noted.
    """

    LAST, STOP = 7, 8

    def on_start(self, session: Session) -> None:
        failpoints._REQUESTED = None
        notes, exit_reason = session.folder / f"deaths-{session.world.rank}", WriterClient._exit_reason

        def noted(client: WriterClient) -> str:
            words = exit_reason(client)
            with notes.open("a") as file:
                file.write(words + "\n")
            return words

        WriterClient._exit_reason = noted  # type: ignore[method-assign]

    def on_step(self, session: Session, step: Any) -> None:
        super().on_step(session, step)
        if session.world.is_lead and step.step == self.LAST - 2:
            _leave_litter(session.folder / "checkpoints" / f"step-{step.step - 1:08d}")
        if step.step == self.LAST:
            os.environ.pop("CLOSERANKS_KILL_AT")
        if step.step == self.STOP:
            session.stop("enough was seen")


class OneWriterDies(WritersDie):
    """Only those of rank 1: that of rank 0 would leave the lease of a store behind, which lasts. Nor may the command
    that holds the run's lease in the store die, which passes the same points: the label comes by a name of its own."""

    def on_start(self, session: Session) -> None:
        super().on_start(session)
        os.environ["CLOSERANKS_KILL_AT"] = "" if session.world.is_lead else os.environ[DIE_AT]


def _leave_litter(checkpoint: Path) -> None:
    """What a commit leaves behind that was killed: the next collection has a single file to remove."""
    if (checkpoint / MANIFEST).exists():
        (checkpoint / part_name(0, 2)).write_text("left by a kill")


class SavedAgain(Hook):
    """Saves a resumed state as it is, untrained, in the folder ``as-it-was`` of the run."""

    def on_start(self, session: Session) -> None:
        session.save(session.folder / "as-it-was")


class StandsStill(Patient):
    """After the step that the environment names, with every save done, until somebody kills the run."""

    def on_step(self, session: Session, step: Any) -> None:
        super().on_step(session, step)
        if step.step == int(os.environ[STAND_AT]):
            if session.world.is_lead:
                (session.folder / "standing").touch()
            signal.pause()


def odd_on_rank_1(sample: dict[str, Any]) -> str | None:
    """A check of samples that comes out differently on one rank."""
    is_odd = detect_world().rank == 1 and int(sample["tokens"][0]) % 5 == 0
    return "it is odd" if is_odd else None


def killed_in_reading(sample: Any) -> None:
    """A check that ends the process it is called in, as the kernel's out-of-memory killer would."""
    os.kill(os.getpid(), signal.SIGKILL)


TROUBLE = "CLOSERANKS_TEST_TROUBLE"


class Troubled(Hook):
    """Trouble comes over the run's folder, which lies in a disk of its own; then rank 0 is killed, so that new workers
    go on in the middle of it; then it is over. Each after a step of its own, in its generation."""

    BEGIN, KILL, END = 4, 6, 9

    def on_step(self, session: Session, step: Any) -> None:
        if not session.world.is_lead:
            return
        kind, place = os.environ[TROUBLE], session.folder.parent
        match session.world.generation, step.step:
            case 0, self.BEGIN:
                _begin_trouble(kind, place, session.folder)
            case 0, self.KILL:
                os.kill(os.getpid(), signal.SIGKILL)
            case 1, self.END:
                _end_trouble(kind, place)


class FullForEver(Troubled):
    """The disk of the run is full from then on."""

    END = -1


def _begin_trouble(kind: str, place: Path, run: Path) -> None:
    match kind:
        case "full":
            room = os.statvfs(place)
            used_bytes = (room.f_blocks - room.f_bfree) * room.f_frsize
            _mount("-o", f"remount,size={used_bytes}", place)
        case "removed":
            shutil.rmtree(run)
        case "read-only":
            _mount("--bind", place, place)
            _mount("-o", "remount,bind,ro", place)


def _end_trouble(kind: str, place: Path) -> None:
    match kind:
        case "full":
            _mount("-o", "remount,size=64m", place)
        case "read-only":
            subprocess.run(["umount", str(place)], check=True)


def _mount(*words: object) -> None:
    subprocess.run(["mount", *map(str, words)], check=True)
