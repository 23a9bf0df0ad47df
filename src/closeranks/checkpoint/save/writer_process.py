"""The writer process, one beside each trainer, which writes checkpoints while training continues.

    trainer --(save, buffer)---> main thread --> primary thread --> remote thread
            <--(reports)---------------------------------'----------------'

Saves on one tier are written one after the other; the slow, durable tier has a thread of its own, so that an upload
never delays the next local save. On the primary tier a newer save cancels an older one; on the remote tier an upload
that has started is finished, and of the queued ones only the newest is kept. Invariants: the process ends when its
trainer ends, however that happens, and when the trainer closes the connection, after releasing the leases it holds;
signals to a whole process group do not end it before that. Imports no torch.

    python -P -m closeranks.checkpoint.save.writer_process SOCKET_FD PARENT_PID
"""

from __future__ import annotations

import mmap
import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from closeranks.checkpoint.format.data_file import ChunkSource
from closeranks.checkpoint.format.manifest import RankPart
from closeranks.checkpoint.save import save_tiers, writer_messages
from closeranks.checkpoint.save.save_task import (
    SaveReport,
    SaveSettings,
    SaveTask,
    decode_save_task,
    decode_settings,
    encode_report,
)
from closeranks.core.system.failpoints import declare_failpoint, failpoint
from closeranks.core.system.linux import die_with_parent
from closeranks.core.system.process_title import set_child_title
from closeranks.core.system.stdio import ignore_broken_pipes
from closeranks.storage import lease

RECEIVED = declare_failpoint(
    "writer.order_received", "a writer process has a save order and the buffer; nothing is written yet"
)

_HEARTBEAT_S = 0.5
"""Minimum time between two heartbeats of a save."""
_LEAVE_S = 0.8
"""How long the release of leases at exit may take; the trainer kills this process soon after."""


@dataclass(slots=True)
class QueuedSave:
    """A save queued for, or being written to, one of the tiers."""

    order: SaveTask
    source: ChunkSource
    release: Callable[[], None]
    part: RankPart | None = None
    last_beat_at: float = field(default=0.0)


class WriterProcess:
    def __init__(self, connection: socket.socket, settings: SaveSettings) -> None:
        self._connection = connection
        self._settings = settings
        self._send_lock = threading.Lock()
        self._changed = threading.Condition()
        self._queue: deque[QueuedSave] = deque()
        self._uploads: deque[QueuedSave] = deque()
        self._uploading: QueuedSave | None = None
        self._newest = ""
        self._is_leaving = False

    def run(self) -> None:
        """Serve until the trainer closes the connection; saves in flight are then cancelled and stay uncommitted."""
        for loop in (self._run_primary, self._run_remote):
            threading.Thread(target=loop, daemon=True).start()
        while True:
            try:
                message = writer_messages.receive(self._connection)
            except (EOFError, OSError):
                self._is_leaving = True
                lease.release_all(_LEAVE_S)
                return
            self._take(message)

    def _take(self, message: writer_messages.WriterMessage) -> None:
        save_task = decode_save_task(message.body)
        failpoint(RECEIVED)
        source = _from_memory(save_task, message.fd)
        with self._changed:
            self._newest = save_task.save
            self._queue.append(QueuedSave(save_task, source, save_tiers.BufferRelease(save_task, self._report)))
            self._changed.notify_all()

    def _run_primary(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue)
                task = self._queue.popleft()
            task.part = save_tiers.save_primary(
                task.order,
                task.source,
                self._settings,
                self._report,
                partial(self._is_superseded, task),
                task.release,
                self._uploading_names,
            )
            if save_tiers.wants_remote(task.order, self._settings):
                self._send({"passed": task.order.save})  # before the remote thread can report anything about it
                with self._changed:
                    self._uploads.append(task)
                    self._changed.notify_all()
            else:
                self._finish(task)

    def _run_remote(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._uploads)
                task, skipped = self._uploads.pop(), list(self._uploads)
                self._uploads.clear()
                self._uploading = task
            for one in skipped:
                self._skip(one)
            save_tiers.save_remote(
                task.order,
                task.source,
                task.part,
                self._settings,
                self._report,
                partial(self._heartbeat, task),
                task.release,
            )
            with self._changed:
                self._uploading = None
            self._finish(task)

    def _skip(self, task: QueuedSave) -> None:
        """Other ranks may not skip this upload, and rank 0 would wait for this rank's part: publish the failure."""
        save_task, why = task.order, "a later save replaced it"
        task.release()
        what = f"step {save_task.step} was not saved to {self._settings.remote}: {why}"
        self._report(SaveReport("failed", save_task.save, save_task.step, "remote", what=what))
        save_tiers.publish_failure_at(self._settings.remote, save_task, why)
        self._finish(task)

    def _uploading_names(self) -> tuple[str, ...]:
        """Checkpoints of the primary tier that the remote thread reads from, or is about to."""
        with self._changed:
            tasks = [*self._uploads, *([self._uploading] if self._uploading else [])]
            return tuple(task.order.folder for task in tasks)

    def _is_superseded(self, task: QueuedSave) -> bool:
        return self._heartbeat(task) or self._newest != task.order.save

    def _heartbeat(self, task: QueuedSave) -> bool:
        """Sends a heartbeat; True only when the process is ending. A newer save does not cancel an upload: if uploads
        are slower than saves, none would ever finish."""
        now = time.monotonic()
        if now - task.last_beat_at >= _HEARTBEAT_S:
            task.last_beat_at = now
            self._send({"beat": task.order.save})
        return self._is_leaving

    def _finish(self, task: QueuedSave) -> None:
        task.release()
        self._send({"done": task.order.save})

    def _report(self, report: SaveReport) -> None:
        self._send({"report": encode_report(report)})

    def _send(self, body: dict[str, object]) -> None:
        with self._send_lock, suppress(OSError):  # the trainer closed the connection; the main thread notices, too
            writer_messages.send(self._connection, body)


def _from_memory(save_task: SaveTask, fd: int | None) -> ChunkSource:
    """The buffer is mapped read-only, not copied, and unmapped when the last view of it is gone."""
    if fd is None or not save_task.num_bytes:
        whole = memoryview(b"")
    else:
        whole = memoryview(mmap.mmap(fd, save_task.data_offset + save_task.num_bytes, access=mmap.ACCESS_READ))
    if fd is not None:
        os.close(fd)
    offsets = save_task.offsets
    return lambda number: whole[offsets[number] : offsets[number] + save_task.chunks[number].num_bytes]


_LAST = 19


def _lower_priority(nice: int) -> None:
    """Lower the priority before any thread is started, since threads inherit it. At nice 19 the process also moves to
    SCHED_IDLE: four threads at nice 19 beside two training threads still take a thirtieth of their time."""
    os.nice(nice)
    if nice == _LAST:
        with suppress(OSError):  # if a sandbox forbids it, nice has to suffice
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def main(arguments: list[str]) -> None:
    """Ignores termination signals: schedulers send SIGTERM to all processes of a job, and the last save must survive
    it, as its trainer does."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    ignore_broken_pipes()
    connection = socket.socket(fileno=int(arguments[0]))
    die_with_parent(int(arguments[1]))
    set_child_title("writer", int(arguments[1]))
    try:
        settings = decode_settings(writer_messages.receive(connection).body)
    except (EOFError, OSError):
        return
    _lower_priority(settings.nice)
    WriterProcess(connection, settings).run()
    sys.stderr.flush()
    os._exit(0)  # the tier threads may still be working, and nothing waits for them


if __name__ == "__main__":
    main(sys.argv[1:])
