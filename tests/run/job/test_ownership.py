"""One run at a time writes to a run folder and to the places of its checkpoints."""

from __future__ import annotations

import io
import os
import re
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from closeranks.core.errors import SetupError
from closeranks.core.world import World
from closeranks.run.job.job import Job, load_job
from closeranks.run.job.ownership import agree_on_folder, check_owned, owned_folder, owned_run_folder
from closeranks.storage.lease import LeaseTimes
from closeranks.storage.local import LocalStorage
from closeranks.storage.ownership import hold_folder
from tests.run.small import open_session, train


def job(run_folder: Path, wait_s: float = 0.0, **checkpoint: Any) -> Job:
    run = {"folder": str(run_folder), "wait_s": wait_s}
    tables = {"model": {}, "data": {}, "train": {"steps": 1}, "run": run, "checkpoint": checkpoint}
    return load_job(None, extra=tables).value


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("resume", ["auto", "{folder}"])
def test_a_second_session_is_refused_and_changes_nothing(tmp_path: Path, resume: str) -> None:
    train(tmp_path / "run")
    before = contents(tmp_path)
    with LocalStorage(tmp_path / "run").own("a run"):
        held = contents(tmp_path)
        resumed = {"resume": resume.format(folder=tmp_path / "run")}
        with pytest.raises(SetupError) as refused:
            open_session(tmp_path / "run", checkpoint=resumed, train={"steps": 8}, optim={"lr": 1.0})
        assert contents(tmp_path) == held
    assert contents(tmp_path) == before
    told = str(refused.value)
    assert re.search(rf"{tmp_path}/run is in use by a run, process {os.getpid()} on \S+ since \d{{4}}-", told)
    for way in ("run.wait_s=600", f"kill {os.getpid()}", "closeranks agent --join"):
        assert way in told
    assert refused.value.exit_code == 2
    assert train(tmp_path / "run", checkpoint={"resume": "auto"}, train={"steps": 8}).steps == 8


@pytest.mark.usefixtures("alone")
def test_a_session_that_is_open_owns_its_folder_and_gives_it_back(tmp_path: Path) -> None:
    session = open_session(tmp_path / "run")
    with pytest.raises(SetupError, match="in use"):
        open_session(tmp_path / "run", checkpoint={"resume": "auto"})
    assert open_session(tmp_path / "run").folder == tmp_path / "run-2", "one that continues nothing goes elsewhere"
    session.close()
    open_session(tmp_path / "run", checkpoint={"resume": "auto"}).close()


def test_what_rank_0_met_is_raised_on_every_rank(tmp_path: Path) -> None:
    given, told = job(tmp_path / "run", resume="auto"), list[str]()

    def share(text: str) -> str:
        told.append(text)
        return text

    with LocalStorage(tmp_path / "run").own("a run"), ExitStack() as held:
        with pytest.raises(SetupError, match="in use") as lead:
            agree_on_folder(given, World(size=2), share, held)
        with pytest.raises(SetupError) as other:
            agree_on_folder(given, World(rank=1, size=2), lambda text: told[0], held)
    assert str(lead.value) == str(other.value)


@pytest.mark.parametrize("key", ["folder", "remote"])
def test_two_runs_do_not_save_to_one_place(tmp_path: Path, key: str) -> None:
    with owned_run_folder(job(tmp_path / "a"), "x"):
        words = f"checkpoint.{key} {tmp_path}/a/checkpoints is in use"
        with (
            pytest.raises(SetupError, match=words),
            owned_run_folder(job(tmp_path / "b", **{key: str(tmp_path / "a" / "checkpoints")}), "x"),
        ):
            pytest.fail("both own it")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["a"], "nothing is left of the one that was refused"


def test_a_place_that_is_named_twice_is_owned_once(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "run")
    for place in ("run", "link", "run/checkpoints"):
        with owned_run_folder(job(tmp_path / "run", folder=str(tmp_path / place), remote=str(tmp_path / place)), "x"):
            pass


def test_starts_at_the_same_moment_get_a_folder_each(tmp_path: Path) -> None:
    """Ten threads, as ten processes would: none is refused, no folder is given out twice."""
    given, at_once, chosen = job(tmp_path / "run"), threading.Barrier(10), list[Path]()

    def start() -> None:
        at_once.wait()
        with owned_run_folder(given, "x") as claim:
            chosen.append(claim.folder)
            at_once.wait()

    threads = [threading.Thread(target=start) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(chosen) == len(set(chosen)) == 10


def test_a_run_waits_as_long_as_it_is_told_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = io.StringIO()  # capsys empties its buffer as it reads: what is written just then would be lost
    monkeypatch.setattr(sys, "stderr", said)
    with ExitStack() as first:
        first.enter_context(owned_run_folder(job(tmp_path / "run"), "x"))
        given = job(tmp_path / "run", wait_s=60.0, resume="auto")
        taken = threading.Event()

        def wait() -> None:
            with owned_run_folder(given, "x"):
                taken.set()

        waiting = threading.Thread(target=wait)
        waiting.start()
        while "waiting for" not in said.getvalue():
            assert waiting.is_alive()
            time.sleep(0.01)
        assert not taken.is_set()
        first.close()
        waiting.join()
    assert taken.is_set()


def check_for_ever() -> None:
    while True:
        check_owned()


def test_a_run_whose_place_was_taken_over_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terms = LeaseTimes(renew_s=0.01, lease_s=60.0)
    monkeypatch.setattr(
        "closeranks.storage.local.hold_folder", lambda *args: hold_folder(*args[:3], terms, is_shared=True)
    )
    with owned_run_folder(job(tmp_path / "run"), "x"):
        check_owned()
        other = '{"owner": "another", "expires_at": 1, "host": "n2 boot ns", "pid": 5}'
        (tmp_path / "run" / ".owner").write_text(other)
        with pytest.raises(SetupError, match="no longer this run's"):
            check_for_ever()
    check_owned()


def test_a_folder_for_checkpoints_that_cannot_exist_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    wrong = job(tmp_path / "run", folder=str(tmp_path / "file" / "x"))
    with pytest.raises(SetupError, match=r"checkpoint\.folder = .*/file/x cannot be written: Not a directory"):  # noqa: SIM117
        with owned_run_folder(wrong, "x"):
            pass


def test_a_place_for_checkpoints_that_cannot_be_locked_stops_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    with owned_run_folder(job(tmp_path / "run", remote=str(tmp_path / "file")), "x"):
        assert "checkpoint.remote could not be locked against other runs" in capsys.readouterr().err


def test_auto_is_refused_where_two_runs_would_not_see_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("closeranks.storage.object_store.remote.RemoteStorage.names", lambda storage, folder="": [])
    place = f"memory://{tmp_path.name}"
    with (
        pytest.raises(SetupError, match=r"checkpoint\.resume=auto is not safe here: .* does not list"),
        owned_run_folder(job(tmp_path / "run", folder=place, resume="auto"), "x"),
    ):
        pytest.fail("it could not be told")
    with owned_run_folder(job(tmp_path / "run", folder=place), "x"):
        assert "does not list" in capsys.readouterr().err


def test_a_comparison_owns_its_folder(tmp_path: Path) -> None:
    with (
        owned_folder(tmp_path, "a comparison"),
        pytest.raises(SetupError, match="in use by a comparison, process"),
        owned_folder(tmp_path, "a comparison"),
    ):
        pytest.fail("both own it")
    (tmp_path / "file").write_text("")
    with pytest.raises(SetupError, match="cannot be written"), owned_folder(tmp_path / "file", "a comparison"):
        pytest.fail("it cannot be made")
