"""The worker's side of a fork: everything from ``os.fork`` in the zygote to the worker's exit.

Invariant: before any code of the job runs, the child dies with the zygote, writes to its own log, and holds no
descriptor of the zygote or of another worker. It exits through ``os._exit``, so that nothing of the zygote's stack
unwinds in it.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
import traceback
from collections.abc import Iterable
from types import FrameType
from typing import NoReturn

from closeranks.agent.detection.progress import SharedProgress
from closeranks.agent.detection.standstill.collective_record import CollectiveRecord
from closeranks.agent.workers.wire import WorkerFds
from closeranks.agent.workers.worker_link import WorkerLink
from closeranks.core.errors import CloseranksError
from closeranks.core.registry import load_object
from closeranks.core.system.environment import set_world
from closeranks.core.system.failpoints import declare_failpoint, failpoint
from closeranks.core.system.linux import die_with_parent
from closeranks.core.system.process_title import set_title

FORKED = declare_failpoint("restore.forked", "a worker is forked, and has done nothing yet")


def run_forked_worker(fds: WorkerFds, zygote: int, zygote_fds: Iterable[int], run: str) -> NoReturn:
    """Everything after the fork. ``zygote_fds``: the zygote's own descriptors, which this child must close; ``run``:
    the run folder, for the process title.

    Descriptors that the job's modules opened on import stay open: they belong to the job.
    """
    status = 1
    try:
        die_with_parent(zygote)
        failpoint(FORKED)
        _set_up_process(fds, zygote_fds)
        status = _work(fds, run)
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(status)


def _set_up_process(fds: WorkerFds, zygote_fds: Iterable[int]) -> None:
    os.setpgid(0, 0)  # its own process group: what the worker starts is killed with it
    os.dup2(fds.output, 1)
    os.dup2(fds.output, 2)
    for fd in (fds.output, *zygote_fds):
        os.close(fd)
    # The agent handles SIGHUP. Not SIG_IGN, which programs that the worker starts would inherit.
    signal.signal(signal.SIGHUP, lambda number, frame: None)
    faulthandler.enable()  # a crash in native code ends the log with the Python stack
    faulthandler.register(signal.SIGUSR1)


def _work(fds: WorkerFds, run: str) -> int:
    progress, collectives = SharedProgress(fds.progress), CollectiveRecord(fds.progress)
    os.close(fds.progress)
    link = WorkerLink(socket.socket(fileno=fds.link), progress, collectives)
    _handle_sigterm(link)
    set_world(link.world)
    set_title(f"rank {link.world.rank} of {link.world.size}", run, short=f"cr-rank-{link.world.rank}")
    return _run_entry(link)


def _handle_sigterm(link: WorkerLink) -> None:
    """Turn SIGTERM into a drain request: a scheduler that ends a job sends it to every process of the job, and a worker
    that died of it could not save.

    Processes that the worker forks have the default handling of SIGTERM. The signal is blocked around a fork: one that
    the C handler has caught, but whose Python handler has not run yet, would be forgotten in the child.
    """

    def drain(signum: int, frame: FrameType | None) -> None:
        link.on_sigterm()

    def block_sigterm() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def unblock_sigterm() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    def reset_in_child() -> None:
        link.close_in_child()
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        unblock_sigterm()

    signal.signal(signal.SIGTERM, drain)
    unblock_sigterm()  # the zygote blocked it before the fork
    os.register_at_fork(before=block_sigterm, after_in_parent=unblock_sigterm, after_in_child=reset_in_child)


def _run_entry(link: WorkerLink) -> int:
    """Call the entry; an exception is reported and determines the exit status.

    The agent writes the traceback to the log: printed here, rank 0's would appear on the terminal beside the report.
    """
    try:
        status = int(load_object(link.entry, place="entry")(link.payload, link) or 0)
    except SystemExit as system_exit:
        return _report_exit(system_exit, link)
    except BaseException as error:
        link.report_failure(error)
        return error.exit_code if isinstance(error, CloseranksError) else 1
    if status == 0:
        link.finish()
    return status


def _report_exit(system_exit: SystemExit, link: WorkerLink) -> int:
    """An entry that calls ``sys.exit`` counts as failed, whatever the exit status."""
    link.report_failure(system_exit)
    return system_exit.code if isinstance(system_exit.code, int) and system_exit.code else 1
