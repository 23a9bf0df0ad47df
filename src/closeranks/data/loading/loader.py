"""Prefetches a rank's batches, so that they are ready when the step asks for them.

A background thread, or loader workers (processes of this rank), read whole steps ahead, up to a limit. Invariants:
steps are returned in order, none lost and none invented, whichever thread or process reads them; a failed read is
raised by the ``take`` of its step; the death of a reader is raised by the next ``take`` and by every one after it.

Call sequence, by the loop: ``start(step)``, ``take(step)``, ``take(step + 1)``, ..., ``close()``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from threading import Lock

import torch

from closeranks.core.errors import CloseranksError
from closeranks.core.protocols import DataSource
from closeranks.data.loading.batch_reader import BatchReader, LoadedBatch, ReadPlan
from closeranks.data.loading.device_transfer import DeviceTransfer
from closeranks.data.loading.fork_server_client import ForkServerClient
from closeranks.data.loading.prefetch_thread import PrefetchThread
from closeranks.data.loading.quarantine import Quarantine
from closeranks.data.loading.read_settings import ReadSettings
from closeranks.data.loading.sample_reader import length_changed_error
from closeranks.data.loading.worker_pool import LoaderWorkerPool
from closeranks.data.sampling.order import BatchSchedule, MicroBatch, SampleOrder
from closeranks.data.source import as_loader_source
from closeranks.data.timing import StageTimes


class Loader:
    """This rank's batches, step by step, on its device."""

    def __init__(
        self,
        source: DataSource,
        order: SampleOrder,
        schedule: BatchSchedule,
        *,
        data_rank: int | None = 0,
        data_size: int = 1,
        device: torch.device | None = None,
        settings: ReadSettings | None = None,
        even: bool = False,
        quarantine: Quarantine | None = None,
    ) -> None:
        """Samples that are in ``quarantine`` when ``start`` is called are not read. ``take`` reports newly found bad
        samples; the loop adds them to the quarantine."""
        if order.num_samples != schedule.num_samples:
            raise length_changed_error(schedule.num_samples, order.num_samples, as_loader_source(source).identity)
        self._plan = ReadPlan(source, order, schedule, data_rank, data_size, settings or ReadSettings(), even)
        self._quarantine = quarantine
        self._transfer = DeviceTransfer(device)
        self._next: int | None = None
        self._fork_server: ForkServerClient | None = None
        self._pool: LoaderWorkerPool | None = None
        self._reader: BatchReader | None = None
        self._rereader: BatchReader | None = None
        self._reading = Lock()
        """Held by the thread that uses the source in this process."""
        self._prefetch_thread: PrefetchThread | None = None
        self._load: Callable[[int], list[LoadedBatch]] | None = None
        self._failure: CloseranksError | None = None
        self.wait_s = 0.0
        """Total time that ``take`` has waited for reading, over the life of the loader."""
        self.last_times = StageTimes()
        """Time spent on reading the step that was taken last, summed over all threads and processes that read it."""

    @property
    def shares(self) -> tuple[int, ...]:
        """Micro-batches per step of each replica or data rank; empty: the same number for all."""
        return self._plan.shares

    @property
    def schedule(self) -> BatchSchedule:
        return self._plan.schedule

    def assigned(self, step: int) -> tuple[MicroBatch, ...]:
        """This rank's micro-batches of a step."""
        return self._plan.assigned(step)

    def set_shares(self, shares: tuple[int, ...]) -> None:
        """Use these shares from now on, unless they are of steps of another length. What was prefetched with other
        shares is read again."""
        shares = shares if sum(shares) == self._plan.schedule.micro_batches_per_step else ()
        before, self._plan = self._plan.shares, replace(self._plan, shares=shares)
        if self._next is not None and shares != before:
            self.start(self._next)

    def start(self, step: int) -> None:
        """Begin to prefetch from ``step`` on; ``take(step)`` comes next. With workers, call it from a thread that lives
        as long as the loader."""
        self._stop()
        self._next, self._failure = step, None
        known = {} if self._quarantine is None else self._quarantine.by_sample()
        plan, settings = replace(self._plan, known=known), self._plan.settings
        steps = range(step, plan.schedule.num_steps)
        if not steps:
            return
        if settings.workers:
            self._pool = LoaderWorkerPool(plan, step, self._running_fork_server())
            load = self._pool.read
        else:
            self._reader, self._reading = BatchReader(plan, step), Lock()
            load = partial(_read_locked, self._reader, self._reading)
        self._load = self._transfer.with_pinning(load)
        if settings.prefetch and not (settings.workers and not self._transfer.is_cuda):
            depth = 1 if settings.workers else settings.prefetch  # processes read ahead themselves; a thread pins
            self._prefetch_thread = PrefetchThread(self._load, steps, depth, plan.source.identity)

    def take(self, step: int) -> list[LoadedBatch]:
        """This rank's micro-batches of ``step``, on the device; an empty list if it has none."""
        if step != self._next or step >= self._plan.schedule.num_steps:
            state = "is not started" if self._next is None else f"is before step {self._next}"
            raise ValueError(f"take({step}), but the loader {state} of {self._plan.schedule.num_steps}")
        if self._failure is not None:
            raise self._failure
        assert self._load is not None
        began = time.perf_counter()
        try:
            loaded = self._load(step) if self._prefetch_thread is None else self._prefetch_thread.take()
        except CloseranksError as error:
            self._failure = error
            raise
        finally:
            self.wait_s += time.perf_counter() - began
        self._next = step + 1
        self.last_times = sum((one.times for one in loaded), StageTimes())
        return self._transfer.to_device(loaded)

    def read_again(self, micro_batches: Sequence[MicroBatch]) -> list[LoadedBatch]:
        """Micro-batches of earlier steps, on the device. Not prefetched: the caller waits while they are read."""
        began = time.perf_counter()
        with self._reading:
            if micro_batches and self._rereader is None:
                known = {} if self._quarantine is None else self._quarantine.by_sample()
                self._rereader = BatchReader(replace(self._plan, known=known), 0)
            loaded = [self._rereader.read_again(one) for one in micro_batches] if self._rereader else []
        self.wait_s += time.perf_counter() - began
        return self._transfer.to_device(loaded)

    def close(self) -> None:
        """Stop prefetching; threads and processes are gone when this returns, within seconds. Safe to call twice;
        ``start`` reopens the loader."""
        fork_server, self._fork_server = self._fork_server, None
        self._stop(fork_server)

    def _stop(self, fork_server: ForkServerClient | None = None) -> None:
        """Stop the thread and the workers, and the fork server if it is given; otherwise it is kept, so that the next
        start need not wait for it."""
        self._next = self._load = None
        pool, self._pool = self._pool, None
        prefetch_thread, self._prefetch_thread = self._prefetch_thread, None
        reader, self._reader, self._rereader = self._reader, None, None
        if pool is not None:
            pool.stop()
        if prefetch_thread is not None:
            prefetch_thread.close()
        if fork_server is not None:
            fork_server.close()
        if pool is not None:
            pool.close()
        if reader is not None and not (prefetch_thread and prefetch_thread.is_alive):
            reader.source.close()

    def _running_fork_server(self) -> ForkServerClient:
        if self._fork_server is not None and not self._fork_server.is_alive:
            self._fork_server.close()
            self._fork_server = None
        self._fork_server = self._fork_server or ForkServerClient()
        return self._fork_server


def _read_locked(reader: BatchReader, reading: Lock, step: int) -> list[LoadedBatch]:
    with reading:
        return reader.read(step)
