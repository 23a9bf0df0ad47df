"""A disk that runs full for one folder: ENOSPC from the kernel, nobody else sees it, and what was written stays.

Mounting leaves this process's mount namespace, so each test does it in a child.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.elastic.faults.worker_processes import can_mount

pytestmark = [pytest.mark.world, can_mount]


def in_child(code: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", f"import os, sys\nfrom pathlib import Path\nfolder = Path(sys.argv[1])\n{code}", folder],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


FULL = """
from closeranks.elastic.faults.fault import InjectedFault
from closeranks.elastic.faults.inject import Injector
from tests.elastic.faults.worker_processes import FakeWorker, FakeView
def attempt(name):
    try:
        (folder / name).write_bytes(bytes(100_000))
    except OSError as error:
        return error.errno
    return 0
view = FakeView([FakeWorker(0, os.getpid())])
with Injector([InjectedFault("diskfull", 2, steps=2)], folder) as injector:
    injector(FakeView([], state="starting"))
    (folder / "step-1").mkdir()
    (folder / "step-1" / "data").write_bytes(b"x" * 300_000)
    (folder / "latest").symlink_to("step-1")
    for step in (1, 2, 3, 4):
        injector(view.at(step))
        if step == 3:
            (folder / "new-1").unlink()  # whoever makes room finds it taken by the next turn
            injector(view)
        print(attempt(f"new-{step}"), len((folder / "latest" / "data").read_bytes()))
print(len(injector.injections))
"""


def test_no_block_is_left_for_some_steps_and_what_lies_there_can_be_read(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints"
    enospc = f"{errno.ENOSPC} 300000"
    assert in_child(FULL, folder).splitlines() == ["0 300000", enospc, enospc, "0 300000", "1"]
    assert (folder / "latest").is_symlink()
    assert (folder / "step-1" / "data").stat().st_size == 300_000
    assert (folder / "new-4").stat().st_size == 100_000
    assert os.listdir(folder.parent) == ["checkpoints"]


def test_an_interrupted_run_leaves_no_mount_and_loses_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    code = FULL.replace(
        "    for step in (1, 2, 3, 4):", "    injector(view.at(2)); raise SystemExit(0)\n    for step in ():"
    )
    in_child(code, folder)
    assert (folder / "step-1" / "data").stat().st_size == 300_000
    assert str(folder) not in Path("/proc/mounts").read_text()


def test_a_killed_one_leaves_no_mount_either(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    code = "from closeranks.elastic.faults.disk import FillableDisk\nFillableDisk(folder).open()\n"
    code += "print(os.path.ismount(folder))\n"
    assert in_child(code + "sys.stdout.flush()\nos._exit(0)", folder) == "True\n"
    assert not os.path.ismount(folder)
    assert str(folder) not in Path("/proc/mounts").read_text()


def test_a_folder_that_a_run_owns_stays_owned(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints"
    code = "from closeranks.run.job.ownership import owned_folder\n"
    code += "with owned_folder(folder, 'a run'):\n"
    code += "    before = (folder / '.owner').stat().st_ino\n"
    code += "".join(f"    {line}\n" for line in FULL.strip().splitlines())
    code += "    print((folder / '.owner').stat().st_ino == before)\n"
    assert in_child(code, folder).splitlines()[-2:] == ["1", "True"]
    assert (folder / "step-1" / "data").stat().st_size == 300_000
