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
_EXIT_REPORT_S = 2.0
_FIX = (
    "Its output may say more. If memory ran out, lower data.workers or data.prefetch; "
    "data.workers = 0 reads in a thread of the rank."
)


class LoaderStopped(Exception):
    """``stop`` was called while a read was waiting."""


class _Process:
    """One loader worker, as its rank sees it."""

    def __init__(self, request: StartLoaderWorker, fork_server: ForkServerClient, plan_fd: int) -> None:
        self.number = request.number
        self.batches = SharedBatchReader()
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.key = fork_server.start_worker(request, theirs, plan_fd)
        self._unsent: list[int] = []
        self._waiting = select.poll()
        self._waiting.register(self.socket, select.POLLIN)
        self._waiting.register(fork_server.control, select.POLLIN)

    def send_credit(self, until: int) -> None:
        """Permit reading of steps before ``until``. What does not fit into the socket's buffer now is sent with the
        next call."""
        free = self.batches.free
        while free:
            self._unsent.append(free.popleft())
        # The buffer is full for now, or the worker is gone, which the next read reports with its cause.
        with suppress(BlockingIOError, SocketClosed):
            messages.send(self.socket, ReadCredit(until, tuple(self._unsent)), flags=socket.MSG_DONTWAIT)
            self._unsent.clear()

    def has_message(self, wait_ms: int) -> bool:
        """Whether a message is there; returns early when the fork server has one."""
        return self.socket.fileno() in [fd for fd, _ in self._waiting.poll(wait_ms)]

    def receive(self) -> Packed | LoaderWorkerFailed:
        message, fds = messages.receive(self.socket)
        if isinstance(message, LoaderWorkerFailed):
            return message
        for fd in fds:
            self.batches.add(message.slot, fd)
            os.close(fd)
        return cast(Packed, self.batches.take(message))


class LoaderWorkerPool:
    def __init__(self, plan: ReadPlan, step: int, fork_server: ForkServerClient) -> None:
        """``UserError`` if the source cannot be pickled for the workers."""
        self._plan = plan
        self._fork_server = fork_server
        self._num_taken = 0
        self._is_stopped = False
        self._failure: CloseranksError | None = None
        plan_fd = pack(plan)
        try:
            count, script = plan.settings.workers, _script(plan_fd)
            requests = [StartLoaderWorker(number, count, step, tuple(sys.path), script) for number in range(count)]
            self._processes = [_Process(request, fork_server, plan_fd) for request in requests]
        finally:
            os.close(plan_fd)
        self._send_credits(step + plan.settings.prefetch)

    def read(self, step: int) -> list[LoadedBatch]:
        """``LoaderStopped`` if the pool was stopped meanwhile."""
        if self._failure is not None:
            raise self._failure
        self._send_credits(step + 1 + self._plan.settings.prefetch)
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
        self._fork_server.stop_workers([process.key for process in self._processes])
        for process in self._processes:
            process.socket.close()

    def _send_credits(self, until: int) -> None:
        for process in self._processes:
            process.send_credit(until)

    def _read_next(self, micro_batch: MicroBatch) -> LoadedBatch:
        process = self._processes[self._num_taken % len(self._processes)]
        while not process.has_message(_POLL_MS):
            self._check_alive()
        try:
            message = process.receive()
        except SocketClosed:
            self._check_alive(_EXIT_REPORT_S)  # dead or about to die: the fork server knows how
            raise CloseranksError(f"{self._named(process)} closed its connection", _FIX) from None
        if isinstance(message, LoaderWorkerFailed):
            raise message.to_exception(self._named(process))
        self._num_taken += 1
        return LoadedBatch.from_message(micro_batch, message)

    def _check_alive(self, wait_s: float = 0.0) -> None:
        """Raises if a worker has died; waits up to ``wait_s`` for a report of one."""
        if self._is_stopped:
            raise LoaderStopped
        try:
            exited = self._fork_server.poll_exits(wait_s)
        except SocketClosed:
            what = f"the parent of the processes that read {self._plan.source.identity}"
            raise CloseranksError(f"{what} {self._fork_server.describe_exit()}", _FIX) from None
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
