"""Has a rank's batches read by loader workers (processes).

    pool = LoaderWorkerPool(plan, step, fork_server)   returns at once; workers start when the fork server is ready
    pool.read(step)                                    this rank's micro-batches, in order; waits for them
    pool.stop(); pool.close()                          from any thread, then from the thread that owns the pool

Micro-batch k of the rank's sequence comes from worker k mod n, so the plan alone determines which worker reads what.
Invariants: no worker reads further than ``prefetch`` steps ahead of the requested one; a worker's failure is raised by
the ``read`` that reaches the failed micro-batch, its death by the next ``read``, with its traceback or its signal, and
nothing is returned after that. A death is not a mistake in the data, so it is no ``UserError``.
"""

from __future__ import annotations

import os
import select
import socket
import sys
from contextlib import suppress
from typing import cast

from closeranks.core.errors import CloseranksError
from closeranks.data.loading import messages
from closeranks.data.loading.batch_reader import LoadedBatch, Packed, ReadPlan
from closeranks.data.loading.fork_server_client import ForkServerClient, describe_exit_status
from closeranks.data.loading.messages import LoaderWorkerFailed, ReadCredit, SocketClosed, StartLoaderWorker
from closeranks.data.loading.shared_batches import SharedBatchReader
from closeranks.data.loading.shared_pickle import pack
from closeranks.data.sampling.order import MicroBatch

_POLL_MS = 1000
_LAST_WORDS_S = 2.0
_FIX = (
    "Its output may say more. If memory ran out, lower data.workers or data.prefetch; "
    "data.workers = 0 reads in a thread of the rank."
)


class LoaderStopped(Exception):
    """``stop`` was called while a read was waiting."""


class _Process:
    """One loader worker, as its rank sees it."""

    def __init__(self, seat: StartLoaderWorker, nursery: ForkServerClient, plan_fd: int) -> None:
        self.number = seat.number
        self.inbox = SharedBatchReader()
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.key = nursery.start_worker(seat, theirs, plan_fd)
        self._unsent: list[int] = []
        self._waiting = select.poll()
        self._waiting.register(self.socket, select.POLLIN)
        self._waiting.register(nursery.control, select.POLLIN)

    def let_go(self, until: int) -> None:
        """Permit reading of steps before ``until``. What does not fit into the socket's buffer now is sent with the
        next call."""
        free = self.inbox.free
        while free:
            self._unsent.append(free.popleft())
        # The buffer is full for now, or the worker is gone, which the next read reports with its cause.
        with suppress(BlockingIOError, SocketClosed):
            messages.send(self.socket, ReadCredit(until, tuple(self._unsent)), flags=socket.MSG_DONTWAIT)
            self._unsent.clear()

    def has_word(self, wait_ms: int) -> bool:
        """Whether a message is there; returns early when the fork server has one."""
        return self.socket.fileno() in [fd for fd, _ in self._waiting.poll(wait_ms)]

    def receive(self) -> Packed | LoaderWorkerFailed:
        said, fds = messages.receive(self.socket)
        if isinstance(said, LoaderWorkerFailed):
            return said
        for fd in fds:
            self.inbox.add(said.slot, fd)
            os.close(fd)
        return cast(Packed, self.inbox.take(said))


class LoaderWorkerPool:
    def __init__(self, plan: ReadPlan, step: int, nursery: ForkServerClient) -> None:
        """``UserError`` if the source cannot be pickled for the workers."""
        self._plan = plan
        self._nursery = nursery
        self._num_taken = 0
        self._is_stopped = False
        self._failure: CloseranksError | None = None
        plan_fd = pack(plan)
        try:
            count, script = plan.settings.workers, _script(plan_fd)
            seats = [StartLoaderWorker(number, count, step, tuple(sys.path), script) for number in range(count)]
            self._processes = [_Process(seat, nursery, plan_fd) for seat in seats]
        finally:
            os.close(plan_fd)
        self._let_go(step + plan.settings.prefetch)

    def read(self, step: int) -> list[LoadedBatch]:
        """``LoaderStopped`` if the pool was stopped meanwhile."""
        if self._failure is not None:
            raise self._failure
        self._let_go(step + 1 + self._plan.settings.prefetch)
        try:
            self._check_alive()
            return [self._read_next(micro_batch) for micro_batch in self._plan.assigned(step)]
        except CloseranksError as error:
            self._failure = error
            raise

    def stop(self) -> None:
        """Close the sockets: a waiting ``read`` returns, and waiting workers exit."""
        self._is_stopped = True
        for process in self._processes:
            with suppress(OSError):
                process.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Returns within a short, bounded time: workers that do not exit are killed."""
        self.stop()
        self._nursery.stop_workers([process.key for process in self._processes])
        for process in self._processes:
            process.socket.close()

    def _let_go(self, until: int) -> None:
        for process in self._processes:
            process.let_go(until)

    def _read_next(self, micro_batch: MicroBatch) -> LoadedBatch:
        process = self._processes[self._num_taken % len(self._processes)]
        while not process.has_word(_POLL_MS):
            self._check_alive()
        try:
            said = process.receive()
        except SocketClosed:
            self._check_alive(_LAST_WORDS_S)  # dead or about to die: the fork server knows how
            raise CloseranksError(f"{self._named(process)} closed its connection", _FIX) from None
        if isinstance(said, LoaderWorkerFailed):
            raise said.to_exception(self._named(process))
        self._num_taken += 1
        return LoadedBatch.from_message(micro_batch, said)

    def _check_alive(self, wait_s: float = 0.0) -> None:
        """Raises if a worker has died; waits up to ``wait_s`` for a report of one."""
        if self._is_stopped:
            raise LoaderStopped
        try:
            exited = self._nursery.poll_exits(wait_s)
        except SocketClosed:
            what = f"the parent of the processes that read {self._plan.source.identity} {self._nursery.describe_exit()}"
            raise CloseranksError(what, _FIX) from None
        for process in self._processes:
            if process.key in exited:
                raise CloseranksError(f"{self._named(process)} {describe_exit_status(exited[process.key])}", _FIX)

    def _named(self, process: _Process) -> str:
        return f"process {process.number + 1} of {len(self._processes)} that read {self._plan.source.identity}"


def _script(plan_fd: int) -> str:
    """The script that was started, if it defines the dataset: the workers must load it as well."""
    if b"__main__" not in os.pread(plan_fd, 1 << 20, 0):
        return ""
    return str(getattr(sys.modules["__main__"], "__file__", None) or "")
