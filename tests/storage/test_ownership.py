"""A folder has one owner, whose lock ends with it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from closeranks.storage.lease import InUseError, Lease, LeaseTimes, StaleListingError, own_lease
from closeranks.storage.local import LocalStorage
from closeranks.storage.object_store.remote import RemoteStorage
from closeranks.storage.ownership import hold_folder
from closeranks.storage.protocol import StorageError

TERMS = LeaseTimes(renew_s=0.05, lease_s=2.0, poll_s=0.01)
UNHURRIED = LeaseTimes(renew_s=1.0, lease_s=4.0, poll_s=0.01)
"""For who watches whether a lease is renewed: a busy machine may renew it half a second late."""

# Owns the folder, forks a child that stays and starts another program that stays, then waits to be killed. A fork lets
# go of the lock when it first runs, so it has to have run.
_OWNER = """
import os, subprocess, sys, time
from pathlib import Path
from closeranks.storage.local import LocalStorage
with LocalStorage(Path(sys.argv[1])).own("a run"):
    has_run, runs = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        os.close(1)
        os.write(runs, b".")
        time.sleep(600)
    os.read(has_run, 1)
    other = subprocess.Popen(["sleep", "600"], start_new_session=True, stdout=subprocess.DEVNULL)
    print(child, other.pid, flush=True)
    time.sleep(600)
"""


def is_free(folder: Path) -> bool:
    try:
        with LocalStorage(folder).own("another run"):
            return True
    except InUseError:
        return False


def test_a_killed_owner_frees_the_folder_at_once_though_its_children_live(tmp_path: Path) -> None:
    owner = subprocess.Popen([sys.executable, "-c", _OWNER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    children = [int(pid) for pid in owner.stdout.readline().split()]
    try:
        assert not is_free(tmp_path)
        told = json.loads((tmp_path / ".owner").read_text())
        assert told["pid"] == owner.pid
        assert told["command"].startswith("-c")
        owner.kill()
        owner.wait()
        for pid in children:
            os.kill(pid, 0)  # they live on
        assert is_free(tmp_path)
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()
        for pid in children:
            os.kill(pid, signal.SIGKILL)


def test_a_forked_child_gives_nothing_back(tmp_path: Path) -> None:
    with LocalStorage(tmp_path).own("a run"):
        if (child := os.fork()) == 0:
            try:
                sys.exit()  # unwinds through the owner's frames
            except SystemExit:
                os._exit(0)
        os.waitpid(child, 0)
        assert not is_free(tmp_path)
        assert (tmp_path / ".owner").stat().st_size
    assert (tmp_path / ".owner").read_bytes() == b""


def test_a_file_that_was_removed_and_made_anew_is_another_lock(tmp_path: Path) -> None:
    with LocalStorage(tmp_path).own("a run that is withdrawn"):
        (tmp_path / ".owner").unlink()
        with LocalStorage(tmp_path).own("the next"):
            assert not is_free(tmp_path)


def test_what_is_no_regular_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / ".owner")
    with pytest.raises(StorageError, match="not a regular file"), LocalStorage(tmp_path).own("a run"):
        pass


FORGED = [
    b"rubbish",
    b"\xff\xfe",
    b"[" * 4000,
    b'{"owner": "x", "expires_at": 1e308, "since": 1e308, "pid": 1, "host": "elsewhere"}',
    b'{"owner": "x", "expires_at": Infinity, "since": NaN}',
    b"\0" * 100_000,
]


@pytest.mark.parametrize("data", FORGED)
@pytest.mark.parametrize("is_shared", [False, True])
def test_no_text_left_in_the_file_blocks_for_ever(tmp_path: Path, data: bytes, is_shared: bool) -> None:
    (tmp_path / ".owner").write_bytes(data)
    with hold_folder(tmp_path, own_lease("a run"), 0.0, TERMS, is_shared):
        assert json.loads((tmp_path / ".owner").read_text())["pid"] == os.getpid()


def elsewhere(expires_at: float) -> Lease:
    return replace(
        own_lease("a run"), owner="a run on n2", host="n2 another-boot pid:[1]", pid=77, expires_at=expires_at
    )


def test_locks_that_do_not_reach_are_backed_by_a_lease(tmp_path: Path) -> None:
    """Another machine's lock is not seen; its lease is, until it has passed and nobody renews it."""
    path = tmp_path / ".owner"
    path.write_bytes(elsewhere(time.time() + 60).encode())
    with (
        pytest.raises(InUseError, match="a run on n2"),
        hold_folder(tmp_path, own_lease("me"), 0.0, TERMS, is_shared=True),
    ):
        pytest.fail("two own it")
    path.write_bytes(elsewhere(time.time() - 1).encode())
    with hold_folder(tmp_path, own_lease("me"), 0.0, TERMS, is_shared=True) as held:
        first = json.loads(path.read_text())["expires_at"]
        while json.loads(path.read_text() or "{}").get("expires_at", 0.0) < first + TERMS.lease_s:
            time.sleep(0.01)
        assert not held.is_gone
        path.write_bytes(elsewhere(time.time() + 60).encode())
        while not held.is_gone:  # this machine stood still, and the other took the folder over
            time.sleep(0.01)


def test_a_lease_that_is_renewed_while_we_watch_is_alive_whatever_the_clock_says(tmp_path: Path) -> None:
    path = tmp_path / ".owner"
    path.write_bytes(elsewhere(1.0).encode())
    stopped = threading.Event()

    def renew() -> None:
        number = 1.0
        while not stopped.wait(0.01):
            number += 1
            path.write_bytes(elsewhere(number).encode())

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        with pytest.raises(InUseError), hold_folder(tmp_path, own_lease("me"), 0.0, UNHURRIED, is_shared=True):
            pytest.fail("two own it")
    finally:
        stopped.set()
        thread.join()


def test_on_a_disk_of_this_machine_the_lock_alone_counts(tmp_path: Path) -> None:
    """After a crash of the machine nothing has to be waited for."""
    (tmp_path / ".owner").write_bytes(elsewhere(time.time() + 60).encode())
    assert is_free(tmp_path)


def test_a_store_that_does_not_list_what_was_written_cannot_be_owned(
    prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = RemoteStorage(f"memory://{prefix}", times=TERMS)
    names = storage.names
    monkeypatch.setattr(storage, "names", lambda folder="": [])
    with pytest.raises(StaleListingError, match="does not list what was just written"), storage.own("a run"):
        pytest.fail("nobody can tell")
    assert names(".owner") == []
