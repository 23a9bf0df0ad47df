"""The trainer's client of its writer process: sends saves to it and receives reports.

    client = WriterClient(settings)
    client.start()                           the process is up 0.2 s later; nothing waits for it
    client.send(task, fd)                    returns at once
    client.poll() -> [SaveReport, ...]       the reports received since; never blocks
    client.close(wait_s=...)                 waits that long for saves in flight, then cancels them

Invariants: nothing here raises because of the writer: if it died, or sent no heartbeat for too long on one of its
tiers, all its saves in flight become ``failed`` and ``released`` reports, and the next save starts another writer; the
writer never outlives its trainer. ``start`` and ``send`` must be called on a thread that lives as long as the run: the
kernel ties the writer's life to the thread that started it. Needs no torch.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass

from closeranks.checkpoint.save import writer_messages
from closeranks.checkpoint.save.save_task import (
    SaveReport,
    SaveSettings,
    SaveTask,
    StorageTier,
    decode_report,
    encode_save_task,
    encode_settings,
)
from closeranks.core.system.environment import child_environment

_SEND_S = 10.0
"""A writer that does not accept a save for this long is considered stuck."""
_DEATH_S = 1.0
_LEAVE_S = 1.0
"""For a writer to release what it holds after the connection closed: an object store's lease does not end with it."""
_GRACE_S = 60.0
"""Added to the time that a save may wait for other ranks: for one fsync, one retry, one lock."""
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class PendingSave:
    """A save that was sent to the writer and is not done."""

    order: SaveTask
    heard_at: float
    tier: StorageTier = "primary"
    """The storage tier that it is being written to, or queued for."""
    is_released: bool = False
    ended: tuple[StorageTier, ...] = ()
    """Tiers on which it was committed or has failed."""


class WriterClient:
    def __init__(self, settings: SaveSettings, patience_s: float | None = None) -> None:
        """``patience_s``: a writer without a heartbeat for this long is considered stuck."""
        self._settings = settings
        self._patience_s = settings.timeout_s + _GRACE_S if patience_s is None else patience_s
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._pending: dict[str, PendingSave] = {}
        self._reports: list[SaveReport] = []

    def start(self) -> None:
        """Start the process before the first save, so that the save need not wait. If it cannot be started, ``send``
        tries again and reports the failure."""
        try:
            self._start()
        except OSError as error:
            self._lose(f"the writer could not be started: {error}")

    def _start(self) -> socket.socket:
        if self._connection is not None:
            return self._connection
        mine, theirs = socket.socketpair()
        words = ["-P", "-m", "closeranks.checkpoint.save.writer_process", str(theirs.fileno()), str(os.getpid())]
        self._connection = mine
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, *words],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=child_environment(1),
                process_group=0,  # signals to the trainer's group must not reach the writer before it ignores them
            )
        mine.settimeout(_SEND_S)
        writer_messages.send(mine, encode_settings(self._settings))
        return mine

    def send(self, task: SaveTask, fd: int | None) -> None:
        """``fd``: of the buffer; still owned by the caller, who must not change its bytes until ``released``."""
        self._listen()  # a writer that has died meanwhile is replaced, not written to
        self._pending[task.save] = PendingSave(task, time.monotonic())
        try:
            writer_messages.send(self._start(), encode_save_task(task), fd)
        except OSError as error:
            self._lose(f"the writer could not be reached: {error}")

    def poll(self) -> list[SaveReport]:
        self._listen()
        reports, self._reports = self._reports, []
        return reports

    def _listen(self) -> None:
        while self._connection is not None and self._has_message(0.0):
            try:
                self._handle_message(writer_messages.receive(self._connection))
            except (EOFError, OSError):
                self._lose(self._exit_reason())
        now = time.monotonic()
        silent = [
            pending_save for pending_save in self._pending.values() if now - pending_save.heard_at > self._patience_s
        ]
        if silent:
            self._lose(f"the writer sent no heartbeat for {self._patience_s:g} s, so the storage may be hanging")

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def is_busy(self) -> bool:
        """Whether any save is unfinished on any tier, according to the messages received so far."""
        return bool(self._pending)

    def wait(self, timeout_s: float) -> list[SaveReport]:
        """Reports received until nothing is in flight or the time is up."""
        until, reports = time.monotonic() + timeout_s, self.poll()
        while self._pending and time.monotonic() < until:
            left_s = min(until - time.monotonic(), self._patience_s, 1.0)
            self._has_message(max(0.0, left_s))
            reports += self.poll()
        return reports

    def close(self, wait_s: float = 0.0) -> list[SaveReport]:
        """Returns the reports received meanwhile; saves still in flight after ``wait_s`` are cancelled and reported as
        failed."""
        reports = self.wait(wait_s) if wait_s else self.poll()
        self._lose("the run ended before it was done", leave_s=_LEAVE_S if self._pending else 0.0)
        lost, self._reports = self._reports, []
        return reports + lost

    def _has_message(self, wait_s: float) -> bool:
        if self._connection is None:
            return False
        waiting = select.poll()  # not select.select: a trainer may have more than a thousand descriptors
        waiting.register(self._connection, select.POLLIN)
        return bool(waiting.poll(wait_s * 1000))

    def _handle_message(self, message: writer_messages.WriterMessage) -> None:
        body = message.body
        if "report" in body:
            report = decode_report(body["report"])
            self._reports.append(report)
            pending_save = self._pending.get(report.save)
            if pending_save is not None:
                self._record_activity(pending_save.tier)
                pending_save.is_released |= report.kind == "released"
                pending_save.ended += (report.tier,) if report.kind in ("committed", "failed") else ()
            return
        ((word, save),) = body.items()
        if save in self._pending:
            self._record_activity(self._pending[save].tier)
            if word == "passed":
                self._pending[save].tier = "remote"
            elif word == "done":
                del self._pending[save]

    def _record_activity(self, tier: StorageTier) -> None:
        """A heartbeat of a tier counts for all saves queued on it, but says nothing about the other tier."""
        now = time.monotonic()
        for pending_save in self._pending.values():
            if pending_save.tier == tier:
                pending_save.heard_at = now

    def _lose(self, why: str, leave_s: float = 0.0) -> None:
        """End the writer and fail all its saves in flight; it gets ``leave_s`` to exit by itself before it is
        killed."""
        if self._connection is not None:
            with suppress(OSError):  # it may have closed first; close alone is not enough if a fork holds a copy
                self._connection.shutdown(socket.SHUT_RDWR)
            self._connection.close()
            self._connection = None
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(leave_s)
            self._process.kill()
            _reap(self._process)
            self._process = None
        pending, self._pending = list(self._pending.values()), {}
        for pending_save in pending:
            self._reports += _failure_reports(pending_save, self._settings, why)

    def _exit_reason(self) -> str:
        """How the writer ended; it has closed the connection, so it has exited or is about to."""
        assert self._process is not None
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return "the writer closed the connection"
        if code < 0:
            return f"the writer was killed by {signal.Signals(-code).name}"
        return f"the writer ended with exit status {code}"


def _reap(process: subprocess.Popen[bytes]) -> None:
    """Wait for the process in the background if it does not end at once: it may be blocked by a dead disk, or niced on
    a busy machine."""
    try:
        process.wait(_DEATH_S)
    except subprocess.TimeoutExpired:
        _log.warning("the writer, process %d, has not exited yet", process.pid)
        with suppress(RuntimeError):  # no thread can be started
            threading.Thread(target=process.wait, name="reap", daemon=True).start()


def _failure_reports(pending_save: PendingSave, settings: SaveSettings, why: str) -> list[SaveReport]:
    task = pending_save.order
    tiers: list[tuple[StorageTier, str]] = [("primary", settings.place)]
    if settings.remote and task.to_remote:
        tiers.append(("remote", settings.remote))
    found = [
        SaveReport("failed", task.save, task.step, tier, what=f"step {task.step} was not saved to {place}: {why}")
        for tier, place in tiers
        if tier not in pending_save.ended
    ]
    return found if pending_save.is_released else [*found, SaveReport("released", task.save, task.step)]
