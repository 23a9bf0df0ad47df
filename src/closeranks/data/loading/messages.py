"""The messages between a rank, its fork server and its loader workers.

Small pickled values over packet sockets between our own processes; file descriptors are passed along. Invariant: a
packet arrives whole or not at all, so that no receiver waits for the rest of one. Does not import torch.
"""

from __future__ import annotations

import os
import pickle
import socket
import traceback
from array import array
from dataclasses import dataclass
from typing import Any, NamedTuple

from closeranks.core.errors import CloseranksError, DataError, decode, encode
from closeranks.core.tracebacks import describe_error

_PACKET_BYTES = 1 << 17
_TRACEBACK_CHARACTERS = 1 << 14
_RIGHTS_BYTES = socket.CMSG_SPACE(2 * array("i").itemsize)


@dataclass(frozen=True, slots=True)
class StartLoaderWorker:
    """Rank to fork server, with two descriptors (the worker's socket, the pickled plan): fork a worker for this
    plan."""

    number: int
    count: int
    step: int
    sys_path: tuple[str, ...] = ()
    main_path: str = ""
    """The script that defines the dataset, if a script does."""
    key: int = 0
    """Identifies the worker in later messages."""


@dataclass(frozen=True, slots=True)
class KillLoaderWorker:
    """Rank to fork server: kill this worker, whose grace period is over."""

    key: int


@dataclass(frozen=True, slots=True)
class LoaderWorkerExited:
    """Fork server to rank: a worker has exited, with this exit code or the negative number of a signal."""

    key: int
    status: int


class ReadCredit(NamedTuple):
    """Rank to worker: steps before ``step`` may be read, and these slots may be reused."""

    step: int
    free: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class LoaderWorkerFailed:
    """Worker to rank, in place of a batch: the error because of which neither this batch nor any later one comes."""

    error: dict[str, Any]
    remote: str
    """The traceback, as text."""

    @classmethod
    def from_exception(cls, error: BaseException, what: str) -> LoaderWorkerFailed:
        """``what`` describes the operation, for errors that do not say it themselves."""
        reported = error if isinstance(error, CloseranksError) else DataError(f"{what} raised {describe_error(error)}")
        text = "".join(traceback.format_exception(error))
        return cls(encode(reported), text[-_TRACEBACK_CHARACTERS:])

    def to_exception(self, process: str) -> CloseranksError:
        error = decode(self.error)
        error.__cause__ = RemoteTraceback(process, self.remote)
        return error


class RemoteTraceback(Exception):
    """The traceback of another process; set as the cause of the error that is raised here."""

    def __init__(self, process: str, text: str) -> None:
        super().__init__(process, text)
        self.process, self.text = process, text

    def __str__(self) -> str:
        return f"in {self.process}\n{self.text}"


class SocketClosed(Exception):
    """The other side has closed the socket. Not an ``OSError``: a dataset's own code may raise those."""


def send(to: socket.socket, message: Any, *fds: int, flags: int = 0) -> None:
    """``BlockingIOError`` if the flags say not to wait and the socket's buffer is full."""
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    try:
        to.sendmsg([data], _rights(fds), flags)  # socket.send_fds ignores the flags
    except ConnectionError:
        raise SocketClosed from None


def receive(of: socket.socket, flags: int = 0) -> tuple[Any, list[int]]:
    """The next message and its descriptors; ``BlockingIOError`` if the flags say not to wait and there is none."""
    try:
        data, rights, _, _ = of.recvmsg(_PACKET_BYTES, _RIGHTS_BYTES, flags)
    except ConnectionError:
        raise SocketClosed from None
    if not data:
        raise SocketClosed
    fds = array("i", b"".join(packed for _, _, packed in rights))
    for fd in fds:
        os.set_inheritable(fd, False)
    return pickle.loads(data), list(fds)


def _rights(fds: tuple[int, ...]) -> list[tuple[int, int, array[int]]]:
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
