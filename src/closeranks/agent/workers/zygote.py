"""The zygote: a process that has imported everything that workers need, and forks them on request.

Run as ``python -m closeranks.agent.workers.zygote CONTROL_FD AGENT_PID``. Control messages are JSON, one per packet,
sent with descriptors where needed. The agent sends its setup once and is answered ``ready`` or ``failed``; from then on
``fork`` at any time, for any generation, is answered ``forked`` (with a pidfd) or ``fork_failed``, and the end of each
child is reported by ``exited``. ``warm`` calls a warm-up function, so that later workers need not each repeat its work;
it has no answer, and later messages wait until it is done. ``bequeath`` carries another control socket and asks for a
standby zygote that serves it; it is answered ``bequeathed`` (with a pidfd) or ``bequest_failed``. The standby outlives
the first zygote, and is sent ``belong`` when the agent has become its parent. Invariant: a zygote has one thread, never
touches CUDA, and ends with its agent (a standby, until ``belong``, when its control socket closes); a worker dies with
its zygote.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from contextlib import suppress
from typing import Any, NoReturn

from closeranks.agent.detection.exit_status import status_from_waitid
from closeranks.agent.detection.failure import plain_message, user_location
from closeranks.agent.workers.forked_worker import run_forked_worker
from closeranks.agent.workers.import_threads import ImportThreads
from closeranks.agent.workers.wire import WorkerFds
from closeranks.core.errors import UserError, encode
from closeranks.core.registry import load_object
from closeranks.core.system.linux import die_with_parent, num_threads
from closeranks.core.system.process_title import set_title

_PACKET_BYTES = 1 << 17


class Zygote:
    """The loop that forks and reaps."""

    def __init__(self, control: socket.socket, run: str) -> None:
        self._control, self._run = control, run
        self._children: dict[int, tuple[int | None, int]] = {}  # pidfd -> (the agent's key, none for a standby; pid)
        self._selector = selectors.PollSelector()  # unlike epoll it holds no descriptor that a child would inherit
        self._selector.register(control, selectors.EVENT_READ)

    def serve(self) -> None:
        """Serve requests until the agent closes the control socket."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is not self._control:
                    self._reap(key.fd)
                elif not self._handle_request():
                    return

    def _handle_request(self) -> bool:
        data, fds, _, _ = socket.recv_fds(self._control, _PACKET_BYTES, len(WorkerFds._fields))
        if not data:
            return False
        message = json.loads(data)
        match message["op"]:
            case "fork":
                self._fork(message["worker"], WorkerFds(*fds))
            case "warm":
                warm_up(message["call"], message["payload"])
            case "bequeath":
                self._fork_standby(fds[0])
            case "belong":
                die_with_parent(message["agent"])
        return True

    def _fork(self, worker: int, fds: WorkerFds) -> None:
        zygote = os.getpid()
        # The zygote ignores SIGTERM, and a child inherits that. Blocked until the child has its handler, a SIGTERM that
        # is sent at once is not lost.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            pid = os.fork()
        except OSError as error:
            self._answer({"op": "fork_failed", "worker": worker, "why": error.strerror})
        else:
            if pid == 0:
                run_forked_worker(fds, zygote, (self._control.fileno(), *self._children), self._run)
            pidfd = self._watch_child(worker, pid)
            self._answer({"op": "forked", "worker": worker, "pid": pid}, [pidfd])
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        for fd in fds:
            os.close(fd)

    def _fork_standby(self, control: int) -> None:
        """Fork a standby copy of this process, which has none of its children."""
        try:
            pid = os.fork()
        except OSError:
            self._answer({"op": "bequest_failed"})
        else:
            if pid == 0:
                self._serve_standby(control)
            pidfd = self._watch_child(None, pid)
            self._answer({"op": "bequeathed", "pid": pid}, [pidfd])
        os.close(control)

    def _serve_standby(self, control: int) -> NoReturn:
        status = 1
        try:
            os.setsid()
            for fd in (self._control.detach(), *self._children):
                os.close(fd)
            Zygote(socket.socket(fileno=control), self._run).serve()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)

    def _watch_child(self, worker: int | None, pid: int) -> int:
        pidfd = os.pidfd_open(pid)
        self._children[pidfd] = (worker, pid)
        self._selector.register(pidfd, selectors.EVENT_READ)
        return pidfd

    def _reap(self, pidfd: int) -> None:
        worker, pid = self._children.pop(pidfd)
        # Until the dead child is reaped its process id is not reused, so this group is certainly its own.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        result = os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
        assert result is not None
        self._selector.unregister(pidfd)
        os.close(pidfd)
        if worker is not None:
            self._answer({"op": "exited", "worker": worker, "status": status_from_waitid(result)})

    def _answer(self, message: dict[str, Any], fds: list[int] | None = None) -> None:
        socket.send_fds(self._control, [json.dumps(message).encode()], fds or [])


def preload(names: list[str]) -> dict[str, int]:
    """Import each module; the first that cannot be imported, or that touches CUDA, is a ``UserError``. Returns how many
    threads each of the user's modules, or each package that they import, has started."""
    threads = ImportThreads()
    for name in names:
        try:
            with threads.watching(), threads.counted_for(name):
                importlib.import_module(name)
        except BaseException as error:
            raise import_error(name, error) from error
        torch: Any = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            fix = "Move what it does there into a function: workers are forked after the import, and CUDA forbids that."
            raise UserError(f"importing '{name}' uses CUDA", fix)
    return dict(threads.started)


def warm_up(call: str, payload: dict[str, Any]) -> None:
    """Call the warm-up function. A failure is only printed to the zygote's log: workers then start slower, and nothing
    else changes."""
    started_at = time.monotonic()
    try:
        load_object(call, place="warm")(payload)
    except BaseException:
        print("warm-up failed; later workers start as slowly as the first", flush=True)
        traceback.print_exc()
    freeze()
    print(f"warmed up in {time.monotonic() - started_at:.2f} s, threads: {num_threads()}", flush=True)


def freeze() -> None:
    """Exempt all objects from garbage collection: one in a child would copy every page that it marks."""
    gc.collect()
    gc.freeze()


def import_error(name: str, error: BaseException) -> UserError:
    """One sentence for an import that failed: what was raised, and where in the user's code."""
    if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
        fix = "Run from the folder that holds it, or install it; the job file's own folder is searched too."
        return UserError(f"there is no module '{error.name}'", fix)
    place = user_location(error)
    where = f" at {place}" if place else ""
    if isinstance(error, SystemExit):
        fix = "Put the script's main code under `if __name__ == '__main__':`."
        return UserError(f"importing '{name}' called sys.exit{where}", fix)
    lines = plain_message(error).splitlines()
    detail = f": {lines[-1]}" if lines else ""
    fix = f"Install '{error.name}'." if isinstance(error, ModuleNotFoundError) else ""
    return UserError(f"importing '{name}' failed{where}: {type(error).__name__}{detail}", fix)


def main() -> None:
    control_fd, agent = int(sys.argv[1]), int(sys.argv[2])
    die_with_parent(agent)
    del sys.argv[1:]
    # A scheduler signals every process of a job; only the agent decides how to react.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    control = socket.socket(fileno=control_fd)
    setup = json.loads(control.recv(_PACKET_BYTES))
    sys.path[:0] = setup["sys_path"]
    set_title("zygote", setup["run"])
    started_at = time.monotonic()
    gc.disable()  # imported objects stay alive: collections took a sixth of the import time
    try:
        threads = preload(setup["preload"])
    except UserError as error:
        control.send(json.dumps({"op": "failed", "error": encode(error)}).encode())
        os._exit(error.exit_code)
    freeze()
    gc.enable()
    seconds = time.monotonic() - started_at
    control.send(json.dumps({"op": "ready", "threads": threads, "seconds": seconds}).encode())
    Zygote(control, setup["run"]).serve()
    os._exit(0)


if __name__ == "__main__":
    main()
