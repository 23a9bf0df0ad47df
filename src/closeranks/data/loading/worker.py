"""The fork server of a rank's loader, and the loader workers that it forks.

Run as ``python -P -m closeranks.data.loading.worker CONTROL_FD RANK_PID``: the fork server of one rank. It imports
torch once and forks a worker for every ``StartLoaderWorker`` message; the rank itself, with its threads and its CUDA
context, is never forked. A worker reads its slice of the rank's micro-batches in order, as far ahead as the rank
permits; when it is done or has failed, it waits for the rank to close its socket. Invariants: the fork server has one
thread and exits when its rank is gone, for whatever reason; a worker dies with the fork server; no process here exits
because of a signal to the whole job, since the rank decides how to react to it.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing.spawn
import os
import random
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

from closeranks.core.errors import CloseranksError, DataError
from closeranks.core.seeds import derive_seed
from closeranks.core.system.linux import die_with_parent
from closeranks.core.system.process_title import set_child_title
from closeranks.core.system.stdio import ignore_broken_pipes
from closeranks.core.tracebacks import describe_error
from closeranks.data.loading import messages
from closeranks.data.loading.messages import (
    LoaderWorkerExited,
    LoaderWorkerFailed,
    ReadCredit,
    SocketClosed,
    StartLoaderWorker,
)

if TYPE_CHECKING:
    from closeranks.data.loading.batch_reader import ReadPlan

_LEAVE_S = 0.5
"""Grace period before a worker is killed whose socket was closed in the middle of a read."""


class ForkServer:
    """Forks workers, reaps them and reports their exits."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._children: dict[int, tuple[int, int]] = {}  # pidfd -> (key, pid)
        self._waiting = select.poll()
        self._waiting.register(control, select.POLLIN)

    def serve(self) -> None:
        """Runs until the rank closes its socket; then the workers have a short grace period to exit."""
        try:
            while True:
                for fd, _ in self._waiting.poll():
                    self._reap(fd) if fd in self._children else self._handle_request()
        except SocketClosed:
            self._end_all()

    def _handle_request(self) -> None:
        request, fds = messages.receive(self._control)
        if isinstance(request, StartLoaderWorker):
            self._fork(request, fds)
            return
        for pidfd, (key, _) in self._children.items():
            if key == request.key:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)

    def _fork(self, request: StartLoaderWorker, fds: list[int]) -> None:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            _run_worker(request, fds, parent, (self._control.fileno(), *self._children))
        for fd in fds:
            os.close(fd)
        pidfd = os.pidfd_open(pid)
        self._children[pidfd] = (request.key, pid)
        self._waiting.register(pidfd, select.POLLIN)

    def _reap(self, pidfd: int) -> None:
        key, pid = self._children.pop(pidfd)
        self._waiting.unregister(pidfd)
        os.close(pidfd)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with suppress(SocketClosed):  # the rank is exiting
            messages.send(self._control, LoaderWorkerExited(key, status))

    def _end_all(self) -> None:
        self._waiting.unregister(self._control)
        until = time.monotonic() + _LEAVE_S
        while self._children and (left_s := until - time.monotonic()) > 0:
            for fd, _ in self._waiting.poll(left_s * 1000):
                self._reap(fd)
        for pidfd, (_, pid) in list(self._children.items()):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.waitpid(pid, 0)


def _run_worker(request: StartLoaderWorker, fds: list[int], parent: int, inherited: tuple[int, ...]) -> NoReturn:
    """The main function of a worker; never returns, whatever the dataset's code does."""
    code = 1
    try:
        die_with_parent(parent)
        faulthandler.register(signal.SIGUSR1, file=2)  # the agent requests a traceback when a read hangs
        for fd in inherited:
            os.close(fd)
        _work(request, socket.socket(fileno=fds[0]), fds[1])
        code = 0
    except SocketClosed:
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def _work(request: StartLoaderWorker, rank: socket.socket, plan_fd: int) -> None:
    try:
        _read_all(_open(request, plan_fd), request, rank)
    except SocketClosed:
        raise
    except BaseException as error:  # any error must reach the rank, which would otherwise wait forever
        messages.send(rank, LoaderWorkerFailed.from_exception(error, "starting a process that reads"))
    while True:
        messages.receive(rank)


def _open(request: StartLoaderWorker, plan_fd: int) -> ReadPlan:
    sys.path[:] = request.sys_path
    if request.main_path:
        multiprocessing.spawn.prepare({"init_main_from_path": request.main_path})
    from closeranks.data.loading.shared_pickle import unpack

    plan: ReadPlan = unpack(plan_fd)
    os.close(plan_fd)
    return plan


def _read_all(plan: ReadPlan, request: StartLoaderWorker, rank: socket.socket) -> None:
    from closeranks.data.loading.batch_reader import BatchReader, WorkerSlice
    from closeranks.data.loading.shared_batches import SharedBatchWriter

    worker_slice = WorkerSlice(request.number, request.count)
    reader, writer, permit = BatchReader(plan, request.step, worker_slice), SharedBatchWriter(), _Permit(rank)
    streams = derive_seed("reading", repr(plan.order))
    for micro_batch in plan.micro_batches_from(request.step, worker_slice):
        for slot in permit.wait_for(micro_batch.step):
            writer.reuse(slot)
        _seed(derive_seed(streams, micro_batch.step, micro_batch.index))
        try:
            loaded = reader.read_next()
        except CloseranksError:
            raise
        except BaseException as error:
            what = f"reading step {micro_batch.step + 1} of {plan.source.identity} raised {describe_error(error)}"
            raise DataError(what) from error
        ref, fd = writer.put(loaded.to_message())
        messages.send(rank, ref, *(() if fd is None else (fd,)))
        if fd is not None:
            os.close(fd)


class _Permit:
    """How far this worker may read, from the credits that its rank has sent."""

    def __init__(self, rank: socket.socket) -> None:
        self._rank = rank
        self._until = 0

    def wait_for(self, step: int) -> list[int]:
        """Waits until ``step`` may be read; returns the slots that were freed meanwhile."""
        free: list[int] = []
        while True:
            try:
                credit, _ = messages.receive(self._rank, flags=0 if step >= self._until else socket.MSG_DONTWAIT)
            except BlockingIOError:
                return free
            assert isinstance(credit, ReadCredit)
            self._until = max(self._until, credit.step)
            free += credit.free


def _seed(seed: int) -> None:
    """Seed the global random generators by the micro-batch: forked workers would otherwise all draw the same numbers,
    and what a dataset draws should not depend on the number of workers. About 20 microseconds."""
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)


def _prepare() -> None:
    import torch

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # a garbage collection in a worker would copy every page that it marks


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    ignore_broken_pipes()  # a dataset that prints must not fail because stdout has no reader
    control, rank = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    if rank:
        die_with_parent(rank)
    set_child_title("loader", os.getppid())
    del sys.argv[1:]
    try:
        _prepare()
        ForkServer(control).serve()
    except SocketClosed:
        os._exit(0)
    os._exit(0)


if __name__ == "__main__":
    main()
