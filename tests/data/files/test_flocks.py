from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from closeranks.data.files.flocks import try_exclusive, try_shared


def test_readers_share_and_nobody_removes_what_they_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"1")
    first, second = try_shared(path), try_shared(path)
    assert first is not None
    assert second is not None
    assert try_exclusive(path) is None
    first.release()
    first.release()
    assert try_exclusive(path) is None, "the second still reads"
    second.release()
    alone = try_exclusive(path)
    assert alone is not None
    assert try_shared(path) is None
    alone.remove()
    assert not path.exists()
    with pytest.raises(FileNotFoundError):
        try_shared(path)


def test_a_lock_on_what_was_replaced_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between opening and locking another process renames it away and makes a new one."""
    path = tmp_path / "part"
    path.write_bytes(b"old")
    opened = os.open

    def open_and_replace(*args: object, **more: object) -> int:
        fd = opened(*args, **more)  # type: ignore[arg-type]
        path.rename(tmp_path / "file")
        path.write_bytes(b"new")
        return fd

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", open_and_replace)
        assert try_exclusive(path) is None
    lock = try_exclusive(path)
    assert lock is not None
    assert os.pread(lock.fd, 3, 0) == b"new"
    lock.release()


CHILD_LIVES_ON = """
import ctypes, os, signal, sys
from pathlib import Path
from closeranks.data.files.flocks import try_exclusive
lock = try_exclusive(Path(sys.argv[1]), create=True)
fork = os.fork if sys.argv[2] != "forks unseen" else ctypes.CDLL(None).fork
if fork() == 0:
    lock.release()  # not its own: nothing happens
    print(os.getpid(), flush=True)
    os.close(1)
    signal.pause()
if sys.argv[2] == "dies":
    os.kill(os.getpid(), signal.SIGKILL)
lock.release()
os._exit(0)
"""


@pytest.mark.parametrize("parent", ["dies", "releases", "forks unseen"])
def test_a_forked_child_keeps_no_lock_of_its_parent(tmp_path: Path, parent: str) -> None:
    path = tmp_path / "part"
    command = [sys.executable, "-c", CHILD_LIVES_ON, str(path), parent]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        try:
            process.wait(60)
            lock = try_exclusive(path)
            assert lock is not None
            lock.release()
        finally:
            os.kill(child, signal.SIGKILL)
