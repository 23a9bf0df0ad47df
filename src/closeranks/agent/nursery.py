"""How does the agent come by workers? It starts the zygote, and asks it to fork.

Invariant: the zygote leads a session of its own, so that Ctrl-C in a terminal reaches the agent alone; when the nursery
is closed, the zygote has been killed and reaped.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Protocol

from closeranks.agent.exits import in_words
from closeranks.agent.launch import LaunchPlan, Listener
from closeranks.agent.loop import Loop
from closeranks.agent.output import OutputLog
from closeranks.agent.wire import WorkerFds
from closeranks.core.errors import CloseranksError, RunFailed, SetupError, decode

_PACKET_BYTES = 1 << 17
_TAIL_LINES = 12


class Newborn(Protocol):
    """Who is told about a fork that was asked for."""

    def born(self, pid: int, pidfd: int) -> None: ...

    def exited(self, status: int) -> None: ...

    def orphaned(self) -> None:
        """The zygote is gone: nobody will tell this worker's exit status."""


class Nursery:
    """The zygote as the agent sees it. Callers turn the loop; ``error`` says when there will be no more workers."""

    def __init__(self, plan: LaunchPlan, loop: Loop, listener: Listener) -> None:
        self._plan = plan
        self._loop = loop
        self._listener = listener
        self.is_ready = False
        self.error: CloseranksError | None = None
        self._waiting: deque[tuple[int, Newborn, WorkerFds]] = deque()
        self._is_forking = False
        self._wards: dict[int, Newborn] = {}
        self._num_asked = 0
        self._is_warm = plan.survival is None or not plan.survival.warm
        self._log = OutputLog(plan.log_folder / plan.zygote_log, lambda line: None, listener.on_note)
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        output = self._log.take_writer()
        with theirs:
            self._process = _spawn(theirs.fileno(), output, plan.environment)
        os.close(output)
        self._pidfd = os.pidfd_open(self._process.pid)
        loop.watch(self._control, self._hear)
        loop.watch(self._log.reader, self._read_log)
        loop.watch(self._pidfd, self._lost)
        self._tell({"preload": _preload(plan), "sys_path": list(plan.sys_path)})

    @property
    def pid(self) -> int:
        return self._process.pid

    def fork(self, ward: Newborn, fds: WorkerFds) -> None:
        """Ask for one worker. The descriptors become the nursery's, which closes them once the zygote has them.

        One request is under way at a time: were both sides to fill their queues, each would wait for the other.
        """
        self._num_asked += 1
        self._waiting.append((self._num_asked, ward, fds))
        self._ask_next()

    def cancel(self) -> None:
        """Those who have not been asked for yet are not born any more; one that is under way still is."""
        while self._waiting:
            _, ward, fds = self._waiting.popleft()
            _close_all(fds)
            ward.exited(-signal.SIGKILL)

    def _ask_next(self) -> None:
        if self._is_forking or not self._waiting or self.error is not None:
            return
        worker, ward, fds = self._waiting.popleft()
        self._wards[worker] = ward
        self._is_forking = True
        self._tell({"op": "fork", "worker": worker}, fds)
        _close_all(fds)

    def _warm_once(self) -> None:
        """When the first workers live: their start is not delayed, and the next ones are forked from who knows more."""
        survival = self._plan.survival
        if self._is_warm or self._is_forking or survival is None:
            return
        self._is_warm = True
        self._tell({"op": "warm", "call": survival.warm, "payload": dict(self._plan.payload)})

    def _tell(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # a dead zygote is noticed by its pidfd, with its status
            socket.send_fds(self._control, [json.dumps(message).encode()], list(fds))

    def _hear(self) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(self._control, _PACKET_BYTES, 1)
        except ConnectionResetError:
            data, fds = b"", []
        if not data:
            self._loop.forget(self._control)
            return
        message = json.loads(data)
        match message["op"]:
            case "ready":
                self.is_ready = True
                self._warn_of_threads(message["num_threads"])
            case "failed":
                self.error = decode(message["error"])
            case "forked":
                self._is_forking = False
                self._wards[message["worker"]].born(message["pid"], fds[0])
                self._ask_next()
                self._warm_once()
            case "exited":
                self._wards.pop(message["worker"]).exited(message["status"])
            case "fork_failed":
                fix = "Start fewer workers, or raise the limit (ulimit -u) or the memory of this host."
                self.error = SetupError(f"a worker could not be forked ({message['why']})", fix)

    def _warn_of_threads(self, num_threads: int) -> None:
        if num_threads > 1:
            self._listener.on_note(
                f"Importing the job's modules started {num_threads - 1} thread(s) in the process that workers are"
                " forked from. They will be missing in the workers, and a lock that one of them holds would hang a"
                " worker: start threads in functions, not on import."
            )

    def _read_log(self) -> None:
        self._log.read()
        if not self._log.is_open:
            self._loop.forget(self._log.reader)

    def _lost(self) -> None:
        """The zygote has ended though nobody closed it. What it said before is heard first."""
        self._loop.forget(self._pidfd)
        status = self._process.wait()
        while self.error is None and self._control in self._loop:
            self._hear()
        if self.error is not None:
            return
        while self._log.read():
            pass
        doing = "" if self.is_ready else f" while it imported {', '.join(_preload(self._plan))}"
        lines = [f"the zygote, the process that workers are forked from, was lost{doing}: {in_words(status)}"]
        lines += [f"  | {line}" for line in self._log.tail(_TAIL_LINES)]
        self.error = RunFailed("\n".join(lines))
        for ward in self._wards.values():
            ward.orphaned()

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Kill the zygote and what else is in its group, and reap it."""
        if self._process.returncode is None:  # not reaped yet, so its number is certainly its own
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        for source in (self._control, self._log.reader, self._pidfd):
            self._loop.forget(source)
        self.cancel()
        os.close(self._pidfd)
        self._control.close()
        self._log.close()


def _spawn(control: int, output: int, environment: Any) -> subprocess.Popen[bytes]:
    """``-P``: a file in the working folder that is named like a module of Python's does not come before it here."""
    command = [sys.executable, "-P", "-m", "closeranks.agent.zygote", str(control), str(os.getpid())]
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        pass_fds=(control,),
        env=dict(environment),
        start_new_session=True,
    )


def _preload(plan: LaunchPlan) -> list[str]:
    return [*plan.preload, plan.entry.partition(":")[0]]


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
