"""How does a rank save without stopping to train?

    ask     a target for the capture that copies the state (``capture.capture``)
    poll    what has become of saves since the last time

What this rank writes of the state is copied into a slot of the saver's own, and handed to a writer in another process,
which does everything else. Costs that slot for as long as the saver is open, and a process of some tens of MB.
Invariants: no failure of a save is raised here, each is a report; all ranks name a save alike because they count the
calls of ``ask`` and ``save_now``, whatever became of each; the slot is never written to while a writer may read it.
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

from closeranks.capture.capture import Capture, Copied
from closeranks.capture.plan import Plan
from closeranks.capture.slots import DATA_AT, Slot
from closeranks.capture.tensors import StateTensor
from closeranks.checkpoint import writing
from closeranks.checkpoint.config import CheckpointConfig
from closeranks.checkpoint.courier import Courier
from closeranks.checkpoint.manifest import Chunk, folder_name
from closeranks.checkpoint.order import Order, Report, Settings, Tier
from closeranks.checkpoint.sources import Straight, chunks_of
from closeranks.core.background import Background, Job
from closeranks.core.errors import CheckpointError
from closeranks.core.faults import declare, point

_POLL_S = 0.02
_REMEMBERED = 64
"""Orders whose places are known: more than are ever under way."""
_NUM_RECENT = 4
_LAST_WORDS_S = 5.0
"""For word of a save that was given up to reach the other ranks, when this one closes."""
_log = logging.getLogger(__name__)
BEGUN = declare("capture.begun", "a save was asked for, and the state is about to be copied")
COPIED = declare("capture.copied", "the copy is complete; the writer does not know of it yet")
SENT = declare("saver.sent", "the writer has the order; the trainer goes on")


class Saver:
    """All calls from the thread that trains."""

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        token: str,
        part: int,
        layout: str,
        settings: Settings,
        config: CheckpointConfig,
    ) -> None:
        """``token``: drawn by rank 0 for this session and shared; ``part``: which opening of the run this is."""
        self._rank, self._num_ranks, self._token, self._part, self._layout = rank, num_ranks, token, part, layout
        self._settings, self._config = settings, config
        self._num_saves = 0
        self._background = Background("checkpoint")
        self._messenger = Background("checkpoint-word")
        """Writes to storage, which may be stuck: what the state is copied by must not wait for that."""
        self._slot = Slot()
        self._courier = Courier(settings)
        self._courier_lock = threading.Lock()
        self._noted: SimpleQueue[Report] = SimpleQueue()
        self._heard: list[Report] = []
        self._holder: Order | None = None
        """The save that the buffer belongs to."""
        self._went_remote: dict[int, bool] = {}
        self._orders: dict[str, Order] = {}
        self._is_closed = False

    def warm(self, capture: Capture, tensors: Sequence[StateTensor]) -> None:
        """Start the writer and give the slot its memory now, in the background, so that the first save need not. What
        cannot be saved is told of by the first save."""
        try:
            self._background.do(self._start_writer)
            capture.make_ready(tensors, SaveTarget(self, None, self._slot))
        except Exception as error:
            _log.info("nothing was made ready for the first save: %s", error)

    def ask(
        self,
        step: int,
        tree: Mapping[str, Any] | None,
        metric: float | None = None,
        *,
        to_remote: bool | None = None,
        is_full: bool | None = None,
    ) -> list[SaveTarget]:
        """A target for the state as it is now; none where the save before is still being written. ``tree`` is handed
        over: it may not change any more. Whether all is written, and whether to the second place too, follows the
        config's rhythm unless it is said."""
        order = self._order(step, tree, metric, to_remote, is_full)
        self._listen()
        if self._holder is not None:
            self.give_up(order, f"the save of step {self._holder.step} is still being written")
            return []
        self._holder = order
        point(BEGUN)
        return [SaveTarget(self, order, self._slot)]

    def poll(self) -> list[Report]:
        """What came to pass since the last call; never waits."""
        self._listen()
        heard, self._heard = self._heard, []
        return heard

    def wait(self, timeout_s: float) -> list[Report]:
        """Until no save is under way any more, or the time is up."""
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
    ) -> list[Report]:
        """Save at once, in this process, from the tensors' own memory; returns when it is over, with all reports since
        the last ``poll``. A save under way is waited for and given up after ``patience_s`` (None: as long as a save
        may take), since two at once would get in each other's way."""
        order = self._order(step, tree, metric, to_remote=True, is_full=None)
        reports = self._cleared(self._settings.timeout_s if patience_s is None else patience_s)
        try:
            source = Straight(items)
            whole = replace(order, chunks=source.chunks())
            writing.save(whole, source, self._settings, reports.append, lambda: False)
        except Exception as error:  # it cannot be saved, and whoever asked decides what follows
            reports += _given_up(order.save, step, self._tiers(order), _in_words(error))
            writing.tell_failure(order, self._settings, _in_words(error))
        return reports

    def path_of(self, step: int) -> str:
        """Where the checkpoint of a step lies once it counts."""
        return f"{self._settings.place.rstrip('/')}/{folder_name(step, self._part)}"

    def went_remote(self, step: int) -> bool:
        """Whether the last save of a step was ordered to the second place too; whether it got there, reports tell."""
        return self._went_remote.get(step, False)

    @property
    def is_busy(self) -> bool:
        """Whether the copy of the last state is still needed, so that none could be taken now."""
        self._listen()
        return self._holder is not None

    @property
    def is_in_flight(self) -> bool:
        """Whether a save is not over: being copied, written, or waiting to count."""
        return self.is_busy or self._courier.is_busy

    def close(self) -> None:
        """Gives up what is under way: ``wait`` first where that matters. Closed once, it stays so."""
        if self._is_closed:
            return
        self._is_closed = True
        _hand(self._background, self._stop_writer)
        self._background.close()
        self._messenger.close(_LAST_WORDS_S)
        self._slot.close()

    # What becomes of a save.

    def _order(
        self,
        step: int,
        tree: Mapping[str, Any] | None,
        metric: float | None,
        to_remote: bool | None,
        is_full: bool | None,
    ) -> Order:
        number, self._num_saves = self._num_saves, self._num_saves + 1
        order = Order(
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
        self._orders[order.save] = order
        if len(self._orders) > _NUM_RECENT:
            del self._orders[next(iter(self._orders))]
        self._went_remote.pop(step, None)
        self._went_remote[step] = "remote" in self._tiers(order)
        if len(self._went_remote) > _REMEMBERED:
            del self._went_remote[next(iter(self._went_remote))]
        return order

    def _tiers(self, order: Order) -> set[Tier]:
        return {"primary", "remote"} if order.to_remote and self._settings.remote else {"primary"}

    def _listen(self) -> None:
        """Gather reports, and follow what they say of the saves under way. Never waits: while the background starts a
        writer or hands it an order, there is nothing to hear."""
        fresh: list[Report] = []
        while True:
            try:
                fresh.append(self._noted.get_nowait())
            except Empty:
                break
        if self._courier_lock.acquire(blocking=False):
            try:
                told = self._courier.poll()
            finally:
                self._courier_lock.release()
            self._pass_on(told)
            fresh += told
        for report in fresh:
            if report.kind == "released" and self._holder is not None and report.save == self._holder.save:
                self._holder = None
        self._heard += fresh

    def _pass_on(self, told: Sequence[Report]) -> None:
        """A writer that died could not tell rank 0's, which would wait for this rank's part; twice does no harm."""
        for report in told:
            order = self._orders.get(report.save)
            if report.kind == "failed" and order is not None:
                _hand(self._messenger, partial(writing.tell_failure, order, self._settings, report.what))

    def give_up(self, order: Order, what: str) -> None:
        """Told here at once, and in a while to rank 0's writer, which would wait for this rank's part."""
        for report in _given_up(order.save, order.step, self._tiers(order), what):
            self._noted.put(report)
        _hand(self._messenger, lambda: writing.tell_failure(order, self._settings, what))

    def _cleared(self, patience_s: float) -> list[Report]:
        """All reports so far, with no save under way any more and no writer."""
        reports = self.wait(patience_s)
        if _hand(self._background, self._stop_writer):
            self._background.drain()
        return reports + self.poll()

    def hand_over(self, order: Order, chunks: tuple[Chunk, ...]) -> None:
        """The copy is complete; by the thread that made it."""
        if not _hand(self._background, lambda: self._send(replace(order, chunks=chunks, begin=DATA_AT))):
            self.give_up(order, "no thread can be started that would hand it to a writer")

    # What follows runs on the background's thread.

    def _send(self, order: Order) -> None:
        try:
            with self._courier_lock:
                self._courier.send(order, self._slot.fd)
        except Exception as error:  # a tree that is no JSON, most likely; the courier may think that it was sent
            self.give_up(order, _in_words(error))
            self._stop_writer(untold=order.save)
        else:
            point(SENT)

    def _start_writer(self) -> None:
        with self._courier_lock:
            if not self._courier.is_alive:
                self._courier.start()

    def _stop_writer(self, untold: str = "") -> None:
        with self._courier_lock:
            for report in self._courier.close():
                if report.save != untold:
                    self._noted.put(report)


class SaveTarget:
    """One save, as a target of a capture: what this rank writes, packed. ``order`` None: nothing is saved yet."""

    def __init__(self, saver: Saver, order: Order | None, slot: Slot) -> None:
        self._saver, self._order = saver, order
        self.slots: Sequence[Slot] = (slot,)

    def entries(self, plan: Plan) -> Sequence[int]:
        return plan.saved

    def open(self, plan: Plan) -> Sequence[int]:
        self.upcoming(plan)
        return plan.packed

    def halfway(self) -> None: ...

    def finish(self, plan: Plan, crcs: Sequence[int], copied: Copied) -> None:
        assert self._order is not None
        point(COPIED)
        try:
            chunks = chunks_of(plan, crcs)
        except CheckpointError as error:
            self.fail(error.what, None)
        else:
            self._saver.hand_over(self._order, chunks)

    def fail(self, problem: str, error: BaseException | None) -> None:
        assert self._order is not None
        self._saver.give_up(self._order, problem)

    def upcoming(self, plan: Plan) -> Sequence[Slot]:
        self.slots[0].reserve(plan.num_saved_bytes, 0)
        return self.slots


def _hand(background: Background, job: Job) -> bool:
    """False where no thread can be started, and so none ever started a writer; others then wait until time is up."""
    try:
        background.do(job)
    except RuntimeError as error:
        _log.warning("nothing can be done in the background of a checkpoint: %s", error)
        return False
    return True


def _given_up(save: str, step: int, tiers: set[Tier], what: str) -> list[Report]:
    """It counts nowhere, and the buffer is free."""
    failed = [Report("failed", save, step, tier, what) for tier in sorted(tiers)]
    return [*failed, Report("released", save, step)]


def _in_words(error: Exception) -> str:
    return f"the state cannot be saved: {type(error).__name__}: {error}"
