"""Disks and folders: full, read-only, removed, renamed or replaced under a live run. Training and its state survive."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path

from closeranks.elastic.faults.disk import FillableDisk, mount_problem
from tests.hostile.cases import STEPS, kind, one_of, step
from tests.hostile.checks import Problem, check_code, check_words, difference, last_states, read_state
from tests.hostile.lab import Lab, Run

LAST = STEPS - 4
_PARTS = ("", "checkpoints", "metrics", "logs")


@kind("disks", needs=mount_problem, first=step(1, 15), last=step(16, LAST), faults=one_of("", "kill"), log=one_of(0, 1))
def full_disk(run: Run, first: int, last: int, faults: str, log: int) -> Generator[None]:
    """Full from one step to another, with a worker killed meanwhile or not; samples logged there or not."""
    disk = _small(run)
    run.settings += [f"data.log_samples={'true' if log else 'false'}"]
    run.faults += [f"kill(rank=1, step={(first + last) // 2})"] if faults else []
    run.hold(first)
    run.hold(last)
    yield
    with run.held(first):
        disk.fill()
    with run.held(last):
        disk.free()


@kind(
    "disks",
    needs=mount_problem,
    combines=False,
    first=step(1, LAST),
    report=one_of("true", "false"),
    faults=one_of("", "kill"),
)
def disk_full_to_the_end(run: Run, first: int, report: str, faults: str) -> Generator[None]:
    """The last save fails, which is told with status 2 and where the state lies instead; the next start goes on from
    the last checkpoint."""
    disk = _small(run)
    run.allowed = {2}
    run.settings.append(f"telemetry.report={report}")
    run.faults += [f"kill(rank=0, step={first + 2})"] if faults else []
    run.hold(first)
    yield
    with run.held(first):
        disk.fill()
    yield
    disk.free()
    if run.process.returncode == 2:
        _check_state_elsewhere(run)


def _check_state_elsewhere(run: Run) -> None:
    """The state of the last step, where the last words say."""
    told = re.search(rf"is in (\S+/step-{STEPS:08d}\S*) instead", run.said)
    if told is None:
        raise Problem(f"nothing says where the last state lies: {run.said[-500:]}")
    expected = read_state(last_states(run.lab.calm)[-1])
    if other := difference(expected, read_state(Path(told[1]))):
        raise Problem(f"{told[1]} is not the undisturbed state: {other}")


@kind(
    "disks",
    needs=lambda: mount_problem() or ("" if shutil.which("chattr") else "chattr is not installed"),
    part=one_of(*_PARTS),
    first=step(1, 12),
    last=step(13, LAST),
    faults=one_of("", "kill"),
)
def read_only_folder(run: Run, part: str, first: int, last: int, faults: str) -> Generator[None]:
    """Nothing in it can be made, opened for writing or removed, also by root."""
    place = run.folder / part if part else run.folder
    run.faults += [f"kill(rank=0, step={(first + last) // 2})"] if faults else []
    run.hold(first)
    run.hold(last)
    yield
    with run.held(first):
        subprocess.run(["chattr", "-f", "-R", "+i", str(place)], check=False)  # files of others may go meanwhile
    with run.held(last):
        subprocess.run(["chattr", "-f", "-R", "-i", str(place)], check=False)


@kind("disks", part=one_of(*_PARTS), how=one_of("removed", "renamed", "a file"), step=step(1, LAST))
def vanished_folder(run: Run, part: str, how: str, step: int) -> Generator[None]:
    """What was saved before is gone with it; what is saved from then on counts, in a folder made anew."""
    run.allowed |= {2} if how == "a file" else set()
    run.hold(step)
    yield
    with run.held(step):
        _spoil(run.folder / part if part else run.folder, how)
    yield
    # Nobody can save where a file stands in the way: the next start is made once that is gone.
    target = run.folder / part if part else run.folder
    if target.is_file():
        target.unlink()


def _spoil(target: Path, how: str) -> None:
    if how == "renamed":
        target.rename(target.with_name(f"away-{target.name}"))
        return
    # A run that writes there meanwhile may be quicker than rmtree.
    for _ in range(20):
        with suppress(FileNotFoundError):
            shutil.rmtree(target, ignore_errors=False)
        if not target.exists():
            break
    if how == "a file":
        target.write_text("in the way")


@kind("disks", is_live=False, needs=mount_problem, how=one_of("full", "read-only", "missing", "a file", "not a folder"))
def folder_that_cannot_be_written_at_the_start(lab: Lab, how: str) -> None:
    """Refused in one sentence, before anything is trained."""
    place = lab.folder / "place"
    place.mkdir()
    if how == "full":
        _mount("-t", "tmpfs", "-o", "size=4k,nr_inodes=2", "tmpfs", str(place))
        (place / "brim").write_bytes(bytes(4096))
    elif how == "read-only":
        _mount("-t", "tmpfs", "-o", "ro", "tmpfs", str(place))
    elif how == "missing":
        place = Path("/proc/no-such-folder")
    elif how == "a file":
        (place / "run").write_text("in the way")
    else:
        place = place / "file"
        place.write_text("no folder")
    done = lab.train(f"run.folder={place}/run")
    if how in ("full", "read-only"):
        subprocess.run(["umount", str(place)], check=True)
    check_words(done.out, done.err, done.code)
    check_code(done.code, {2}, done.said)


def _small(run: Run) -> FillableDisk:
    assert run.disk is not None
    return run.disk


def _mount(*words: str) -> None:
    subprocess.run(["mount", *words], check=True, env={**os.environ, "LC_ALL": "C"})
