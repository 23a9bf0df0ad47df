"""The lanes of a writer: local saves never wait for uploads, and an upload that began is finished."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from closeranks.checkpoint.save import save_tiers, writer_messages, writer_process
from closeranks.checkpoint.save.save_task import SaveReport, decode_report, encode_save_task
from closeranks.storage.local import LocalStorage
from tests.checkpoint import saving
from tests.checkpoint.saving import memfd, order, settings


class Gate(LocalStorage):
    """A far place that takes data files only while it is open."""

    opened = threading.Event()
    reached = threading.Event()

    def create(self, name: str, num_bytes: int):  # type: ignore[no-untyped-def]
        Gate.reached.set()
        assert Gate.opened.wait(30.0)
        return super().create(name, num_bytes)


@pytest.fixture
def far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = tmp_path / "far"
    Gate.opened.clear()
    Gate.reached.clear()
    monkeypatch.setattr(
        save_tiers, "open_storage", lambda place: (Gate if place == str(path) else LocalStorage)(Path(place))
    )
    yield path
    Gate.opened.set()


class Trainer:
    """Speaks to a writer that runs in threads of this process."""

    def __init__(self, where: save_tiers.SaveSettings) -> None:
        self.mine, theirs = socket.socketpair()
        self.thread = threading.Thread(target=writer_process.WriterProcess(theirs, where).run)
        self.thread.start()
        self.theirs = theirs

    def send(self, step: int, rank: int = 0, num_ranks: int = 1) -> None:
        made, buffer = order(step, rank, num_ranks)
        with memfd(buffer) as fd:
            writer_messages.send(self.mine, encode_save_task(made), fd)

    def hear(self, until: str) -> list[SaveReport]:
        """Reports up to the one that reads ``tier.kind.step``, or to ``done.step``."""
        heard: list[SaveReport] = []
        while True:
            body = writer_messages.receive(self.mine).body
            if "done" in body and until == f"done.{body['done'].partition('-')[2]}":
                return heard
            if "report" in body:
                report = decode_report(body["report"])
                heard.append(report)
                if f"{report.tier}.{report.kind}.{report.step}" == until:
                    return heard

    def close(self) -> None:
        self.mine.shutdown(socket.SHUT_WR)
        self.thread.join(10.0)
        assert not self.thread.is_alive()
        self.mine.close()
        self.theirs.close()


def test_an_upload_keeps_no_local_save_waiting_and_its_files_from_being_collected(tmp_path: Path, far: Path) -> None:
    near = tmp_path / "near"
    trainer = Trainer(settings(near, remote=str(far), keep_last=2))
    trainer.send(1)
    trainer.hear("primary.committed.1")
    assert Gate.reached.wait(60.0)
    for step in (2, 3, 4):  # the upload of step 1 is under way
        trainer.send(step)
        trainer.hear(f"primary.committed.{step}")
    trainer.send(5)
    trainer.hear("primary.committed.5")
    kept = saving.committed_names(LocalStorage(near))
    assert "step-00000001" in kept, "it is being read from"
    Gate.opened.set()
    heard = trainer.hear("done.5")
    remote = [(report.kind, report.step) for report in heard if report.tier == "remote"]
    assert remote == [
        ("written", 1),
        ("committed", 1),
        *[("failed", n) for n in (2, 3, 4)],
        ("written", 5),
        ("committed", 5),
    ]
    assert "a later save replaced it" in next(report.what for report in heard if report.kind == "failed")
    for step in (1, 5):
        saving.assert_loads(far, step)
    trainer.send(6)
    trainer.hear("done.6")
    assert "step-00000001" not in saving.committed_names(LocalStorage(near))
    trainer.close()


def test_an_upload_that_is_skipped_keeps_no_other_rank_waiting(tmp_path: Path, far: Path) -> None:
    where = settings(tmp_path / "near", remote=str(far), timeout_s=600.0)
    trainer = Trainer(where)
    for step in (1, 2, 3):
        trainer.send(step, 1, 2)
        trainer.hear(f"primary.released.{step}")
        assert Gate.reached.wait(60.0)
    trainer.send(4, 1, 2)  # the lanes follow one another: the upload of step 3 waits once this one is begun
    trainer.hear("primary.released.4")
    Gate.opened.set()
    trainer.hear("done.2")
    trainer.hear("remote.written.4")
    trainer.close()
    reports = saving.save(order(2, 0, 2, to_remote=True), where)
    failed = next(report for report in reports if (report.kind, report.tier) == ("failed", "remote"))
    assert "rank 1 could not save: a later save replaced it" in failed.what


def test_starting_takes_a_fraction_of_a_second_and_no_torch() -> None:
    heavy = "{'torch', 'pydantic', 'fsspec'}"
    code = f"import sys; import closeranks.checkpoint.save.writer_process; sys.exit(bool({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-P", "-c", code]).returncode == 0


def test_a_writer_without_a_trainer_ends() -> None:
    one, other = socket.socketpair()
    with other:
        one.close()
        command = [sys.executable, "-P", "-m", "closeranks.checkpoint.save.writer_process", str(other.fileno()), "1"]
        assert subprocess.run(command, pass_fds=[other.fileno()], timeout=30).returncode == 111  # not its parent
