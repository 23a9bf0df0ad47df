"""How do batches reach the step before it asks for them?

A background thread reads whole steps ahead through a bounded queue. Invariant: steps come out in order, none is lost
and none is made up: a thread that fails is raised by the next ``take``, and by every one after it.

Call sequence, by the loop: ``start(step)``, ``take(step)``, ``take(step + 1)``, ..., ``close()``.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from queue import Empty, Queue
from typing import TypeAlias, cast

import torch
from torch import Tensor

from closeranks.core.blame import describe
from closeranks.core.errors import CloseranksError, DataError
from closeranks.core.protocols import Batch, Source
from closeranks.data.order import Schedule
from closeranks.data.reader import Loaded, Reader, map_tensors

_LOG = logging.getLogger(__name__)
_CLOSE_TIMEOUT_S = 10.0
_Ready: TypeAlias = Queue[list[Loaded] | CloseranksError]


@dataclass(slots=True)
class _Ahead:
    """One life of the background thread."""

    thread: threading.Thread
    ready: _Ready
    stopped: threading.Event


class Loader:
    """This rank's batches, step by step, on its device."""

    def __init__(
        self,
        source: Source,
        schedule: Schedule,
        seed: int,
        *,
        data_rank: int = 0,
        data_size: int = 1,
        device: torch.device | None = None,
        prefetch: int = 2,
        check_finite: bool = True,
        even: bool = False,
    ) -> None:
        if len(source) != schedule.num_samples:
            raise ValueError(f"a schedule for {schedule.num_samples} samples over a source of {len(source)}")
        self._reader = Reader(source, schedule, seed, data_rank, data_size, check_finite, even)
        self._device = _indexed(device or torch.device("cpu"))
        self._prefetch = prefetch
        self._next: int | None = None
        self._ahead: _Ahead | None = None
        self._failure: CloseranksError | None = None
        self.wait_s = 0.0
        """How long ``take`` has waited for reading, over the life of the loader."""

    def start(self, step: int) -> None:
        """Stand before ``step`` and begin to read ahead from there."""
        self.close()
        self._next, self._failure = step, None
        if self._prefetch > 0 and step < self._reader.schedule.num_steps:
            ready: _Ready = Queue(maxsize=self._prefetch)
            stopped = threading.Event()
            thread = threading.Thread(
                target=self._read_ahead, args=(step, ready, stopped), name="closeranks-loader", daemon=True
            )
            self._ahead = _Ahead(thread, ready, stopped)
            thread.start()

    def take(self, step: int) -> list[Loaded]:
        """This rank's micro-batches of ``step``, on the device; an empty list where it has none."""
        if step != self._next or step >= self._reader.schedule.num_steps:
            place = "is not started" if self._next is None else f"stands before step {self._next}"
            raise ValueError(f"take({step}), but the loader {place} of {self._reader.schedule.num_steps}")
        if self._failure is not None:
            raise self._failure
        began = time.perf_counter()
        outcome = self._load(step) if self._ahead is None else self._ahead.ready.get()
        self.wait_s += time.perf_counter() - began
        if isinstance(outcome, CloseranksError):
            self._failure = outcome
            raise outcome
        self._next = step + 1
        return [Loaded(one.micro_batch, self._on_device(one.batch)) for one in outcome]

    def close(self) -> None:
        """Stop reading ahead and join the thread. Safe to call twice; ``start`` opens the loader again."""
        ahead, self._ahead, self._next = self._ahead, None, None
        if ahead is None:
            return
        ahead.stopped.set()
        _drain(ahead.ready)  # a thread that waits for room puts its last step and sees the flag
        ahead.thread.join(_CLOSE_TIMEOUT_S)
        if ahead.thread.is_alive():
            identity = self._reader.source.identity
            _LOG.warning(
                "reading of %s did not stop within %g s; its thread is left behind", identity, _CLOSE_TIMEOUT_S
            )

    def _load(self, step: int) -> list[Loaded]:
        return [Loaded(one.micro_batch, self._pinned(one.batch)) for one in self._reader.read(step)]

    def _read_ahead(self, first: int, ready: _Ready, stopped: threading.Event) -> None:
        step = first
        try:
            if self._device.type == "cuda":
                # Pinning belongs to the thread's current device: left at 0, every rank would open a context there.
                torch.cuda.set_device(self._device)
            for step in range(first, self._reader.schedule.num_steps):
                if stopped.is_set():
                    return
                ready.put(self._load(step))
        except CloseranksError as error:
            ready.put(error)
        except BaseException as error:  # whatever ends this thread must reach the loop, which would wait forever
            failure = DataError(f"reading step {step} of {self._reader.source.identity} raised {describe(error)}")
            failure.__cause__ = error
            ready.put(failure)

    def _pinned(self, batch: Batch) -> Batch:
        """Page-locked copies where a GPU follows: only from those can a copy run beside the computation."""
        return cast(Batch, map_tensors(batch, Tensor.pin_memory)) if self._device.type == "cuda" else batch

    def _on_device(self, batch: Batch) -> Batch:
        if self._device.type == "cpu":
            return batch
        return cast(Batch, map_tensors(batch, lambda tensor: tensor.to(self._device, non_blocking=True)))


def _indexed(device: torch.device) -> torch.device:
    """``cuda`` means the current device of whoever says it; the background thread must not ask for itself."""
    is_bare = device.type == "cuda" and device.index is None
    return torch.device("cuda", torch.cuda.current_device()) if is_bare else device


def _drain(queue: _Ready) -> None:
    try:
        while True:
            queue.get_nowait()
    except Empty:
        return
