"""Saves checkpoints asynchronously, while training continues.

    begin_save     begin a save: a target for the capture that copies the state (``capture.capture``)
    poll           reports on saves since the last call

The part of the state that this rank writes is copied into a slot owned by the saver and sent to a writer process, which
does everything else. Costs that slot for as long as the saver is open, and a process of some tens of MB. Invariants: a
failed save is never raised here, only reported; all ranks give a save the same name, because they count the calls of
``begin_save`` and ``save_now``, whatever the result of each; the slot is never written to while a writer may read it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from closeranks.capture.capture import Capture, StateCopy
from closeranks.capture.capture_plan import CapturePlan
from closeranks.capture.slots import DATA_AT, SnapshotSlot
from closeranks.capture.tensors import StateTensor
from closeranks.checkpoint.config import CheckpointConfig
from closeranks.checkpoint.format.manifest import Chunk, folder_name
from closeranks.checkpoint.save import save_tiers
from closeranks.checkpoint.save.chunk_source import TensorChunkSource, chunks_of_plan
from closeranks.checkpoint.save.save_task import SaveReport, SaveSettings, SaveTask, StorageTier
from closeranks.checkpoint.save.writer_client import WriterClient
from closeranks.core.errors import CheckpointError
from closeranks.core.system.background_thread import BackgroundThread, Task
from closeranks.core.system.failpoints import declare_failpoint, failpoint

_POLL_S = 0.02
_REMEMBERED = 64
"""Number of saves whose tiers are remembered: more than are ever in flight."""
_NUM_RECENT = 4
_FAILURE_S = 5.0
"""When this rank closes: time for the report of a failed save to reach the other ranks."""
_log = logging.getLogger(__name__)
BEGUN = declare_failpoint("capture.begun", "a save was requested, and the state is about to be copied")
COPIED = declare_failpoint("capture.copied", "the copy is complete; the writer does not know of it yet")
SENT = declare_failpoint("saver.sent", "the writer has the save order; training continues")


class CheckpointSaver:
    """All methods are called from the training thread, unless they say otherwise."""

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        token: str,
        part: int,
        layout: str,
        settings: SaveSettings,
        config: CheckpointConfig,
    ) -> None:
        """``token``: drawn by rank 0 for this session and shared with all ranks; ``part``: the attempt number of the
        run."""
        self._rank, self._num_ranks, self._token, self._part, self._layout = rank, num_ranks, token, part, layout
        self._settings, self._config = settings, config
        self._num_saves = 0
        self._background = BackgroundThread("checkpoint")
        self._failure_thread = BackgroundThread("checkpoint-word")
        """Publishes failures to storage, which may block: the copy of the state must not wait for that."""
        self._slot = SnapshotSlot()
        self._client = WriterClient(settings)
        self._client_lock = threading.Lock()
        self._noted: SimpleQueue[SaveReport] = SimpleQueue()
        self._reports: list[SaveReport] = []
        self._holder: SaveTask | None = None
        """The save that is using the buffer."""
        self._saved_remotely: dict[int, bool] = {}
        self._tasks: dict[str, SaveTask] = {}
        self._is_closed = False

    def warm_up(self, capture: Capture, tensors: Sequence[StateTensor]) -> None:
        """Start the writer and allocate the slot's memory now, in the background, so that the first save need not. A
        state that cannot be saved is reported by the first save."""
        try:
            self._background.submit(self._start_writer)
            capture.make_ready(tensors, SaveTarget(self, None, self._slot))
        except Exception as error:
            _log.info("could not prepare for the first save: %s", error)

    def begin_save(
        self,
        step: int,
        tree: Mapping[str, Any] | None,
        metric: float | None = None,
        *,
        to_remote: bool | None = None,
        is_full: bool | None = None,
    ) -> list[SaveTarget]:
        """A capture target for the current state; an empty list if the previous save is still being written. ``tree``
        must not change afterwards. ``is_full`` (write everything) and ``to_remote`` (also save to the second tier)
        follow the config unless given."""
        task = self._new_task(step, tree, metric, to_remote, is_full)
        self._listen()
        if self._holder is not None:
            self.report_failure(task, f"the save of step {self._holder.step} is still being written")
            return []
        self._holder = task
        failpoint(BEGUN)
        return [SaveTarget(self, task, self._slot)]

    def poll(self) -> list[SaveReport]:
        """Reports since the last call; never blocks."""
        self._listen()
        reports, self._reports = self._reports, []
        return reports

    def wait(self, timeout_s: float) -> list[SaveReport]:
        """Wait until no save is in flight, or the time is up."""
        until = time.monotonic() + timeout_s
        while self.is_in_flight and time.monotonic() < until:
            time.sleep(_POLL_S)
        return self.poll()

    def save_now(
        self,
        step: int,
        items: Sequence[StateTensor],
        tree: Mapping[str, Any] | None,
        metric: float | None = None,
        *,
        patience_s: float | None = None,
    ) -> list[SaveReport]:
        """Save synchronously, in this process, from the tensors' own memory; returns all reports since the last
        ``poll``. A save in flight is waited for, and cancelled after ``patience_s`` (None: as long as a save may take),
        since two concurrent saves would interfere."""
        task = self._new_task(step, tree, metric, to_remote=True, is_full=None)
        reports = self._cleared(self._settings.timeout_s if patience_s is None else patience_s)
        try:
            source = TensorChunkSource(items)
            whole = replace(task, chunks=source.chunks())
            save_tiers.save_to_all_tiers(whole, source, self._settings, reports.append, lambda: False)
        except Exception as error:  # it cannot be saved, and the caller decides what follows
            reports += _failure_reports(task.save, step, self._tiers(task), _in_words(error))
            save_tiers.publish_failure(task, self._settings, _in_words(error))
        return reports

    def path_of(self, step: int) -> str:
        """Where the checkpoint of a step lies once it is committed."""
        return f"{self._settings.place.rstrip('/')}/{folder_name(step, self._part)}"

    def went_remote(self, step: int) -> bool:
        """Whether the last save of a step was also meant for the second tier; reports say whether it got there."""
        return self._saved_remotely.get(step, False)

    @property
    def is_busy(self) -> bool:
        """Whether the buffer is still in use, so that no save could be started now."""
        self._listen()
        return self._holder is not None

    @property
    def is_in_flight(self) -> bool:
        """Whether a save is unfinished: being copied, written, or waiting for its commit."""
        return self.is_busy or self._client.is_busy

    def close(self) -> None:
        """Cancels saves in flight: call ``wait`` first if they matter. May be called more than once."""
        if self._is_closed:
            return
        self._is_closed = True
        _submit(self._background, self._stop_writer)
        self._background.close()
        self._failure_thread.close(_FAILURE_S)
        self._slot.close()

    # The life of a save.

    def _new_task(
        self,
        step: int,
        tree: Mapping[str, Any] | None,
        metric: float | None,
        to_remote: bool | None,
        is_full: bool | None,
    ) -> SaveTask:
        number, self._num_saves = self._num_saves, self._num_saves + 1
        task = SaveTask(
            save=f"{self._token}-{number}",
            folder=folder_name(step, self._part),
            step=step,
            rank=self._rank,
            num_ranks=self._num_ranks,
            layout=self._layout,
            chunks=(),
            is_full=number % self._config.full_every == 0 if is_full is None else is_full,
            to_remote=number % self._config.remote_every == 0 if to_remote is None else to_remote,
            tree=tree if self._rank == 0 else None,
            metric=metric,
        )
        self._tasks[task.save] = task
        if len(self._tasks) > _NUM_RECENT:
            del self._tasks[next(iter(self._tasks))]
        self._saved_remotely.pop(step, None)
        self._saved_remotely[step] = "remote" in self._tiers(task)
        if len(self._saved_remotely) > _REMEMBERED:
            del self._saved_remotely[next(iter(self._saved_remotely))]
        return task

    def _tiers(self, task: SaveTask) -> set[StorageTier]:
        return {"primary", "remote"} if task.to_remote and self._settings.remote else {"primary"}

    def _listen(self) -> None:
        """Collect reports and update the saves in flight from them. Never blocks: while the background thread starts a
        writer or sends it a save, there is nothing to receive."""
        fresh: list[SaveReport] = []
        while True:
            try:
                fresh.append(self._noted.get_nowait())
            except Empty:
                break
        if self._client_lock.acquire(blocking=False):
            try:
                reports = self._client.poll()
            finally:
                self._client_lock.release()
            self._publish_failures(reports)
            fresh += reports
        for report in fresh:
            if report.kind == "released" and self._holder is not None and report.save == self._holder.save:
                self._holder = None
        self._reports += fresh

    def _publish_failures(self, reports: Sequence[SaveReport]) -> None:
        """Publish failures on behalf of a writer that died: rank 0's writer would wait for this rank's part. Publishing
        twice does no harm."""
        for report in reports:
            task = self._tasks.get(report.save)
            if report.kind == "failed" and task is not None:
                _submit(self._failure_thread, partial(save_tiers.publish_failure, task, self._settings, report.what))

    def report_failure(self, task: SaveTask, what: str) -> None:
        """Report a failed save here at once and, in the background, to rank 0's writer, which would wait for this
        rank's part."""
        for report in _failure_reports(task.save, task.step, self._tiers(task), what):
            self._noted.put(report)
        _submit(self._failure_thread, lambda: save_tiers.publish_failure(task, self._settings, what))

    def _cleared(self, patience_s: float) -> list[SaveReport]:
        """End all saves in flight and the writer; returns all reports so far."""
        reports = self.wait(patience_s)
        if _submit(self._background, self._stop_writer):
            self._background.drain()
        return reports + self.poll()

    def send_to_writer(self, task: SaveTask, chunks: tuple[Chunk, ...]) -> None:
        """Called by the copying thread when the copy is complete."""
        if not _submit(self._background, lambda: self._send(replace(task, chunks=chunks, data_offset=DATA_AT))):
            self.report_failure(task, "no thread can be started to pass it to a writer")

    # The methods below run on the background thread.

    def _send(self, task: SaveTask) -> None:
        try:
            with self._client_lock:
                self._client.send(task, self._slot.fd)
        except Exception as error:  # most likely a tree that is not JSON; the client may already count it as sent
            self.report_failure(task, _in_words(error))
            self._stop_writer(unreported=task.save)
        else:
            failpoint(SENT)

    def _start_writer(self) -> None:
        with self._client_lock:
            if not self._client.is_alive:
                self._client.start()

    def _stop_writer(self, unreported: str = "") -> None:
        with self._client_lock:
            for report in self._client.close():
                if report.save != unreported:
                    self._noted.put(report)


class SaveTarget:
    """One save, as a target of a capture: what this rank writes, packed. ``task`` None: warm-up, nothing is saved."""

    def __init__(self, saver: CheckpointSaver, task: SaveTask | None, slot: SnapshotSlot) -> None:
        self._saver, self._task = saver, task
        self.slots: Sequence[SnapshotSlot] = (slot,)

    def entries(self, plan: CapturePlan) -> Sequence[int]:
        return plan.saved

    def open(self, plan: CapturePlan) -> Sequence[int]:
        self.next_slots(plan)
        return plan.packed

    def on_half_copied(self) -> None: ...

    def finish(self, plan: CapturePlan, crcs: Sequence[int], copied: StateCopy) -> None:
        assert self._task is not None
        failpoint(COPIED)
        try:
            chunks = chunks_of_plan(plan, crcs)
        except CheckpointError as error:
            self.fail(error.what, None)
        else:
            self._saver.send_to_writer(self._task, chunks)

    def fail(self, problem: str, error: BaseException | None) -> None:
        assert self._task is not None
        self._saver.report_failure(self._task, problem)

    def next_slots(self, plan: CapturePlan) -> Sequence[SnapshotSlot]:
        self.slots[0].reserve(plan.num_saved_bytes, 0)
        return self.slots


def _submit(background: BackgroundThread, task: Task) -> bool:
    """False if no thread can be started: then no writer was ever started either, and other ranks wait for their
    timeout."""
    try:
        background.submit(task)
    except RuntimeError as error:
        _log.warning("the background thread for checkpoints cannot be started: %s", error)
        return False
    return True


def _failure_reports(save: str, step: int, tiers: set[StorageTier], what: str) -> list[SaveReport]:
    """Reports for a save that failed on all tiers: the buffer is free."""
    failed = [SaveReport("failed", save, step, tier, what) for tier in sorted(tiers)]
    return [*failed, SaveReport("released", save, step)]


def _in_words(error: Exception) -> str:
    return f"the state cannot be saved: {type(error).__name__}: {error}"
