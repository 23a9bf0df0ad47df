"""The agent's client of the zygote: starts it, asks it to fork workers, and replaces it when it is lost.

A zygote that has imported everything and warmed up forks a standby copy of itself: if the zygote is lost, the next
workers need not wait for imports. Invariant: the zygote leads its own session, so that Ctrl-C in a terminal reaches
only the agent; every descendant that loses its parent becomes a child of this process and is reaped; when the client is
closed, the zygote, its standby and the processes that workers left running are gone.
"""

from __future__ import annotations

import json
import os
import signal
import socket
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from closeranks.agent.detection.exit_status import describe_status
from closeranks.agent.detection.process_probe import kernel_state
from closeranks.agent.event_loop import EventLoop
from closeranks.agent.launch_plan import AgentCallbacks, LaunchPlan
from closeranks.agent.workers.orphans import children_of, end_orphans
from closeranks.agent.workers.output import OutputLog
from closeranks.agent.workers.wire import WorkerFds
from closeranks.agent.workers.zygote_handle import ZygoteProcess, start_zygote
from closeranks.core.errors import CloseranksError, RunFailed, SetupError, decode
from closeranks.core.system.linux import reap_orphans, set_child_subreaper

_PACKET_BYTES = 1 << 17
_TAIL_LINES = 12
_STOPPED_S = 2.0
"""How long a zygote that was stopped by a signal may leave a request unanswered."""
_STUCK_S = 120.0
"""The same for one that runs: its warm-up after the first generation may take long on a busy machine."""


class ForkListener(Protocol):
    """Callbacks about a fork that was requested."""

    def on_forked(self, pid: int, pidfd: int) -> None: ...

    def on_exited(self, status: int) -> None: ...

    def on_zygote_lost(self) -> None:
        """The zygote is gone: this worker's exit status will not be reported."""

    @property
    def awaits_status(self) -> bool:
        """Whether it is dead, and its exit status is not known yet."""


class ZygoteClient:
    """The agent's side of the zygote. Callers run the event loop; when ``error`` is set, no more workers can be
    forked."""

    def __init__(self, plan: LaunchPlan, loop: EventLoop, callbacks: AgentCallbacks) -> None:
        self._plan = plan
        self._loop = loop
        self._callbacks = callbacks
        self.is_ready = False
        self.was_ready = False
        """Whether a zygote was ever ready to fork, so that a replacement can be expected to work."""
        self.error: CloseranksError | None = None
        self._waiting: deque[tuple[int, ForkListener, WorkerFds]] = deque()
        self._is_forking = False
        self._awaited_since: float | None = None
        self._listeners: dict[int, ForkListener] = {}
        self._num_requested = 0
        self._is_warm = plan.recovery_settings is None or not plan.recovery_settings.warm_up
        self._standby: ZygoteProcess | None = None
        self._standby_control: socket.socket | None = None
        """Our end of the control socket of a standby that was requested."""
        self._was_subreaper = set_child_subreaper(True)
        self._earlier_children = children_of(os.getpid())
        """Children that existed before the run: they are not orphans of it."""
        self._log = OutputLog(plan.log_folder / plan.zygote_log, lambda line: None, callbacks.on_note)
        loop.watch(self._log.reader, self._read_log)
        self._zygote = self._start()

    @property
    def pid(self) -> int:
        return self._zygote.pid

    def reap(self) -> None:
        """Reap adopted orphans, except the zygote and its standby, which are reaped through their handles."""
        reap_orphans({self.pid} if self._standby is None else {self.pid, self._standby.pid})

    def restart(self) -> None:
        """Replace a zygote that was lost: by its standby, or by a new one, which has to import everything first."""
        self._close_zygote(self._zygote)
        self.cancel()
        self._drop_standby_control()
        self._listeners.clear()
        self._is_forking = False
        self.error = None
        standby, self._standby = self._standby, None
        self.is_ready = standby is not None
        if standby is None:
            self._is_warm = self._plan.recovery_settings is None or not self._plan.recovery_settings.warm_up
            self._zygote = self._start()
        else:
            self._zygote = standby
            self._loop.unwatch(standby.pidfd)
            self._watch(standby)
            _send(standby.control, {"op": "belong", "agent": os.getpid()})

    def _start(self) -> ZygoteProcess:
        zygote = start_zygote(self._log.writer, self._plan.environment)
        self._watch(zygote)
        setup: dict[str, Any] = {"preload": _preload(self._plan), "sys_path": list(self._plan.sys_path)}
        setup["run"] = str(self._plan.log_folder.parent)
        _send(zygote.control, setup)
        return zygote

    def _watch(self, zygote: ZygoteProcess) -> None:
        self._loop.watch(zygote.control, self._receive)
        self._loop.watch(zygote.pidfd, self._on_lost)

    def _close_zygote(self, zygote: ZygoteProcess) -> None:
        self._loop.unwatch(zygote.control)
        self._loop.unwatch(zygote.pidfd)
        zygote.close()

    def fork(self, listener: ForkListener, fds: WorkerFds) -> None:
        """Request one worker. Takes ownership of the descriptors and closes them once the zygote has them.

        One request is in flight at a time: if both sides filled their socket buffers, they would deadlock.
        """
        self._num_requested += 1
        self._waiting.append((self._num_requested, listener, fds))
        self._request_next()

    def check_alive(self, now: float) -> float | None:
        """Kill a zygote that is stopped or stuck; its loss is then handled like any other.

        Returns when to check again.
        """
        is_awaited = self._is_forking or any(listener.awaits_status for listener in self._listeners.values())
        if not is_awaited or self.error is not None:
            self._awaited_since = None
            return None
        self._awaited_since = self._awaited_since or now
        due = self._awaited_since + (_STOPPED_S if kernel_state(self.pid) in ("T", "t") else _STUCK_S)
        if now >= due:
            self._zygote.kill()
            return None
        return min(due, now + _STOPPED_S)

    def cancel(self) -> None:
        """Drop the forks that have not been requested yet; the one in flight still happens."""
        while self._waiting:
            _, listener, fds = self._waiting.popleft()
            _close_all(fds)
            listener.on_exited(-signal.SIGKILL)

    def _request_next(self) -> None:
        if self._is_forking or not self._waiting or self.error is not None:
            return
        worker, listener, fds = self._waiting.popleft()
        self._listeners[worker] = listener
        self._is_forking = True
        _send(self._zygote.control, {"op": "fork", "worker": worker}, fds)
        _close_all(fds)

    def _prepare(self) -> None:
        """Warm up the zygote and request a standby, so that later workers start faster, also after the loss of this
        zygote. Done when the first workers are alive, so that their start is not delayed."""
        settings = self._plan.recovery_settings
        if self._is_forking or settings is None:
            return
        if not self._is_warm:
            self._is_warm = True
            _send(self._zygote.control, {"op": "warm", "call": settings.warm_up, "payload": dict(self._plan.payload)})
        if self._standby is None and self._standby_control is None:
            self._standby_control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                _send(self._zygote.control, {"op": "bequeath"}, [theirs.fileno()])

    def _on_standby(self, pid: int, pidfd: int) -> None:
        control, self._standby_control = self._standby_control, None
        assert control is not None
        self._standby = ZygoteProcess(pid, pidfd, control)
        self._loop.watch(pidfd, self._close_standby)

    def _close_standby(self) -> None:
        """The standby is lost; the forks of the next generation request another."""
        standby, self._standby = self._standby, None
        if standby is not None:
            self._close_zygote(standby)

    def _drop_standby_control(self) -> None:
        """A standby that was forked anyway sees its control socket close, and ends."""
        if self._standby_control is not None:
            self._standby_control.close()
            self._standby_control = None

    def _receive(self) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(self._zygote.control, _PACKET_BYTES, 1)
        except ConnectionResetError:
            data, fds = b"", []
        if not data:
            self._loop.unwatch(self._zygote.control)
            return
        message = json.loads(data)
        match message["op"]:
            case "ready":
                self.is_ready = self.was_ready = True
                self._warn_of_threads(message["threads"])
            case "failed":
                self.error = decode(message["error"])
            case "forked":
                self._is_forking = False
                self._listeners[message["worker"]].on_forked(message["pid"], fds[0])
                self._request_next()
                self._prepare()
            case "bequeathed":
                self._on_standby(message["pid"], fds[0])
            case "bequest_failed":
                self._drop_standby_control()
            case "exited":
                self._listeners.pop(message["worker"]).on_exited(message["status"])
            case "fork_failed":
                self._is_forking = False
                self._listeners.pop(message["worker"]).on_exited(-signal.SIGKILL)
                fix = "Start fewer workers, or raise the limit (ulimit -u) or the memory of this host."
                self.error = SetupError(f"a worker could not be forked ({message['why']})", fix)

    def _warn_of_threads(self, threads: Mapping[str, int]) -> None:
        """``threads``: for each package, how many threads its import started."""
        if not threads:
            return
        told = " and ".join(f"{name} started {count} thread{'s' * (count > 1)}" for name, count in threads.items())
        self._callbacks.on_note(
            f"Importing {told} in the process that workers are forked from, and workers do not have them. Thread pools"
            " of numeric libraries (OpenBLAS, OpenMP) start again by themselves. For others, import the package, or"
            " start the thread, inside a function."
        )

    def move_log(self, folder: Path) -> None:
        self._log.move(folder)

    def _read_log(self) -> None:
        self._log.read()
        if not self._log.is_open:
            self._loop.unwatch(self._log.reader)

    def _on_lost(self) -> None:
        """The zygote has ended unexpectedly. Messages that it sent before are read first."""
        self._loop.unwatch(self._zygote.pidfd)
        status = self._zygote.status()
        while self.error is None and self._zygote.control in self._loop:
            self._receive()
        if self.error is not None:
            return
        self._log.drain()
        doing = "" if self.is_ready else f" while it imported {', '.join(_preload(self._plan))}"
        lines = [f"the zygote, the process that workers are forked from, was lost{doing}: {describe_status(status)}"]
        lines += [f"  | {line}" for line in self._log.tail(_TAIL_LINES)]
        self.error = RunFailed("\n".join(lines))
        for listener in self._listeners.values():
            listener.on_zygote_lost()

    def __enter__(self) -> ZygoteClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._close_zygote(self._zygote)
        self._close_standby()
        self._drop_standby_control()
        self._loop.unwatch(self._log.reader)
        self.cancel()
        self._log.close()
        end_orphans(self._earlier_children, self._callbacks.on_note)
        reap_orphans(())
        set_child_subreaper(self._was_subreaper)


def _send(control: socket.socket, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
    with suppress(BrokenPipeError, ConnectionResetError):  # a dead zygote is noticed by its pidfd, with its status
        socket.send_fds(control, [json.dumps(message).encode()], list(fds))


def _preload(plan: LaunchPlan) -> list[str]:
    return [*plan.preload, plan.entry.partition(":")[0]]


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
