"""A trainer and its writer: orders, reports, deaths, silence, and who outlives whom."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from closeranks.checkpoint.save import writer_messages
from closeranks.checkpoint.save.save_task import SaveReport, SaveSettings, encode_report
from closeranks.checkpoint.save.writer_client import PendingSave, WriterClient
from tests.checkpoint.saving import assert_loads, kinds, memfd, order, settings

pytestmark = pytest.mark.world


@contextmanager
def courier(where: SaveSettings, **options: float) -> Iterator[WriterClient]:
    made = WriterClient(where, **options)
    try:
        yield made
    finally:
        made.close()


def send(to: WriterClient, step: int, rank: int = 0, num_ranks: int = 1, **changes: object) -> list[SaveReport]:
    """Hand over and wait until it is done."""
    made, buffer = order(step, rank, num_ranks, **changes)
    with memfd(buffer) as fd:
        to.send(made, fd)
        return to.wait(30.0)


def pid_of(one: WriterClient) -> int:
    assert one._process is not None
    return one._process.pid


def test_messages_arrive_whole_with_their_descriptor() -> None:
    one, other = socket.socketpair()
    long = {"text": "é" * 300_000}
    with one, other, memfd(b"bytes") as fd:
        sender = threading.Thread(
            target=lambda: [writer_messages.send(one, long, fd), writer_messages.send(one, {"n": 1}), one.close()]
        )
        sender.start()
        first, second = writer_messages.receive(other), writer_messages.receive(other)
        assert (first.body, second) == (long, writer_messages.WriterMessage({"n": 1}, None))
        assert first.fd is not None
        assert os.pread(first.fd, 10, 0) == b"bytes"
        os.close(first.fd)
        with pytest.raises(EOFError):
            writer_messages.receive(other)
        sender.join()


def test_a_message_cut_short_is_the_end() -> None:
    one, other = socket.socketpair()
    with other:
        with one:
            one.sendall((100).to_bytes(4, "little") + b"{}")
        with pytest.raises(EOFError):
            writer_messages.receive(other)


def test_saves_follow_one_another(tmp_path: Path) -> None:
    with courier(settings(tmp_path)) as one:
        one.start()
        assert one.is_alive
        for step in (1, 2, 3):
            assert kinds(send(one, step)) == ["written", "released", "committed"]
            assert_loads(tmp_path, step)
        assert not one.is_busy
        pid = pid_of(one)
    assert not one.is_alive
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_two_ranks_and_their_writers_make_one_checkpoint(tmp_path: Path) -> None:
    where = settings(tmp_path)
    with courier(where) as zero, courier(where) as one:
        for step in (1, 2):
            made, buffer = order(step, 0, 2)
            with memfd(buffer) as fd:
                zero.send(made, fd)
                assert kinds(send(one, step, 1, 2)) == ["written", "released"]
                assert kinds(zero.wait(30.0)) == ["written", "released", "committed"]
            assert_loads(tmp_path, step)


def test_two_tiers(tmp_path: Path) -> None:
    with courier(settings(tmp_path / "near", remote=str(tmp_path / "far"))) as one:
        reports = send(one, 1)
        assert kinds(reports) == ["written", "released", "committed"]
        assert kinds(reports, "remote") == ["written", "committed"]
        assert kinds(send(one, 2, to_remote=False), "remote") == []
    assert_loads(tmp_path / "far", 1)
    assert_loads(tmp_path / "near", 2)


def test_a_newer_order_supersedes_one_that_waits(tmp_path: Path) -> None:
    with courier(settings(tmp_path, timeout_s=60.0)) as one:
        made, buffer = order(1, 0, 2)  # rank 1 never comes
        with memfd(buffer) as fd:
            one.send(made, fd)
            while "released" not in kinds(one.wait(0.05)):
                assert one.is_busy
            reports = send(one, 2)
    assert [(report.kind, report.step) for report in reports] == [
        ("failed", 1),
        ("written", 2),
        ("released", 2),
        ("committed", 2),
    ]
    assert "a later save was requested" in reports[0].what
    assert_loads(tmp_path, 2)


def test_a_writer_that_died_is_reported_and_replaced(tmp_path: Path) -> None:
    where = settings(tmp_path / "near", remote=str(tmp_path / "far"), timeout_s=60.0)
    with courier(where) as one:
        made, buffer = order(1, 0, 2)
        with memfd(buffer) as fd:
            one.send(made, fd)
            reports: list[SaveReport] = []
            while "released" not in kinds(reports):
                reports += one.wait(0.05)
            os.kill(pid_of(one), signal.SIGKILL)
            reports += one.wait(30.0)
        failed = [report for report in reports if report.kind == "failed"]
        assert [report.tier for report in failed] == ["primary", "remote"]
        assert all("the writer was killed by SIGKILL" in report.what for report in failed)
        assert [report.kind for report in reports].count("released") == 1
        assert not one.is_busy
        assert kinds(send(one, 2), "remote") == ["written", "committed"]
    assert_loads(tmp_path / "far", 2)


def test_a_writer_that_died_between_saves_is_replaced_unseen(tmp_path: Path) -> None:
    with courier(settings(tmp_path)) as one:
        send(one, 1)
        os.kill(pid_of(one), signal.SIGKILL)
        assert one._process is not None
        one._process.wait()
        assert not one.is_alive
        assert kinds(send(one, 2)) == ["written", "released", "committed"]


def test_a_writer_that_is_stuck_is_given_up(tmp_path: Path) -> None:
    """Those that are well have the usual patience, however busy the machine is."""
    with courier(settings(tmp_path, timeout_s=60.0)) as one:
        send(one, 1)
        os.kill(pid_of(one), signal.SIGSTOP)
        usual_s, one._patience_s = one._patience_s, 1.0
        reports = send(one, 2)
        assert kinds(reports) == ["failed", "released"]
        assert "no heartbeat for 1 s" in reports[0].what
        one._patience_s = usual_s
        assert kinds(send(one, 3)) == ["written", "released", "committed"]


def test_a_lane_at_work_does_not_hide_one_that_is_stuck(tmp_path: Path) -> None:
    one = WriterClient(settings(tmp_path / "near", remote=str(tmp_path / "far")), patience_s=5.0)
    now = time.monotonic()
    one._pending = {f"token-{step}": PendingSave(order(step)[0], now - 4.0) for step in (1, 2, 3)}

    def silent_s() -> list[int]:
        return [round(time.monotonic() - pending.heard_at) for pending in one._pending.values()]

    one._handle_message(writer_messages.WriterMessage({"beat": "token-1"}, None))
    assert silent_s() == [0, 0, 0], "those in the queue wait for the one at work"
    one._handle_message(writer_messages.WriterMessage({"passed": "token-1"}, None))
    for pending in one._pending.values():
        pending.heard_at = now - 4.0
    one._handle_message(writer_messages.WriterMessage({"beat": "token-1"}, None))
    assert silent_s() == [0, 4, 4]
    one._handle_message(
        writer_messages.WriterMessage({"report": encode_report(SaveReport("written", "token-1", 1, "remote"))}, None)
    )
    one._handle_message(writer_messages.WriterMessage({"done": "token-1"}, None))
    assert silent_s() == [4, 4]
    for pending in one._pending.values():
        pending.heard_at = now - 6.0
    assert [report.save for report in one.poll() if report.kind == "released"] == ["token-2", "token-3"]


def test_waiting_for_other_ranks_is_a_sign_of_life(tmp_path: Path) -> None:
    with courier(settings(tmp_path, timeout_s=2.0)) as one:
        send(one, 1)  # it has started: only the wait itself is held to less than the time it takes
        one._patience_s = 1.2
        reports = send(one, 2, 0, 2)
    assert "no report from rank 1 in 2 s" in reports[-1].what


def test_signals_for_the_whole_job_do_not_end_a_save(tmp_path: Path) -> None:
    with courier(settings(tmp_path, timeout_s=60.0)) as zero, courier(settings(tmp_path)) as one:
        made, buffer = order(1, 0, 2)
        with memfd(buffer) as fd:
            zero.send(made, fd)
            while "written" not in kinds(zero.wait(0.05)):
                assert zero.is_busy
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
                os.kill(pid_of(zero), number)
            send(one, 1, 1, 2)
            assert kinds(zero.wait(30.0))[-1] == "committed"


def test_closing_gives_up_unless_it_is_asked_to_wait(tmp_path: Path) -> None:
    made, buffer = order(1)
    with memfd(buffer) as fd:
        patient = WriterClient(settings(tmp_path / "a"))
        patient.send(made, fd)
        assert kinds(patient.close(wait_s=30.0)) == ["written", "released", "committed"]
        hasty = WriterClient(settings(tmp_path / "b", timeout_s=60.0))
        hasty.send(order(1, 0, 2)[0], fd)
        reports = hasty.close()
        assert kinds(reports)[-2:] == ["failed", "released"]
        assert "the run ended before it was done" in reports[-2].what
        assert hasty.close() == []


def test_a_writer_that_takes_long_to_die_is_reaped_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where it is niced on a busy machine: a process that nobody waits for stays a zombie as long as its parent."""
    monkeypatch.setattr("closeranks.checkpoint.save.writer_client._DEATH_S", 0.0)
    one = WriterClient(settings(tmp_path))
    one.start()
    process = one._process
    assert process is not None
    one.close()
    for thread in [thread for thread in threading.enumerate() if thread.name == "reap"]:
        thread.join()
    assert process.returncode is not None


def test_the_writer_is_nice_small_quick_and_without_torch(tmp_path: Path) -> None:
    with courier(settings(tmp_path, nice=7)) as one:
        send(one, 1)
        pid = pid_of(one)
        assert os.getpriority(os.PRIO_PROCESS, pid) == min(19, os.getpriority(os.PRIO_PROCESS, 0) + 7)
        status = Path(f"/proc/{pid}/status").read_text()
        memory_kb = int(status.partition("RssAnon:")[2].split()[0])
        assert memory_kb < 80_000
        assert "torch" not in Path(f"/proc/{pid}/maps").read_text()


TRAINER = """
import os, sys, time
from closeranks.checkpoint.save.writer_client import WriterClient
from tests.checkpoint import saving
one = WriterClient(saving.settings(sys.argv[1], timeout_s=60.0))
made, buffer = saving.order(1, 0, 2)
fd = os.memfd_create("buffer")
os.write(fd, buffer)
one.send(made, fd)
while "written" not in saving.kinds(one.wait(0.05)): pass
print(one._process.pid, flush=True)
time.sleep(60)
"""


def test_the_writer_never_outlives_its_trainer(tmp_path: Path) -> None:
    root = Path(__file__).parents[3]
    with subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=root
    ) as trainer:
        assert trainer.stdout is not None
        pid = int(trainer.stdout.readline())
        watched = os.pidfd_open(pid)
        trainer.kill()
    poll = select.poll()
    poll.register(watched)
    assert poll.poll(10_000), "the writer lives on"
    os.close(watched)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
