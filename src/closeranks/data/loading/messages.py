"""What do a rank, its loader's nursery and its loader's processes say to each other?

Small pickled values over packet sockets between our own processes; descriptors ride along. Invariant: a packet is whole
or not there, so that nobody waits for the rest of one. Needs no torch.
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
    """Rank to nursery, with two descriptors (the process's socket, the packed plan): fork a process for this."""

    number: int
    count: int
    step: int
    sys_path: tuple[str, ...] = ()
    main_path: str = ""
    """The script that the dataset comes from, where it comes from one."""
    key: int = 0
    """Names the process from now on."""


@dataclass(frozen=True, slots=True)
class KillLoaderWorker:
    """Rank to nursery: this process has had its time."""

    key: int


@dataclass(frozen=True, slots=True)
class LoaderWorkerExited:
    """Nursery to rank: a process has ended, with this exit code or the negative number of a signal."""

    key: int
    status: int


class ReadCredit(NamedTuple):
    """Rank to process: steps before ``step`` may be read, and these slots may be written again."""

    step: int
    free: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class LoaderWorkerFailed:
    """Process to rank, in place of a batch: why there is none, now or ever after."""

    error: dict[str, Any]
    remote: str
    """The traceback, as text."""

    @classmethod
    def from_exception(cls, error: BaseException, what: str) -> LoaderWorkerFailed:
        """``what`` was going on, for errors that do not say so themselves."""
        told = error if isinstance(error, CloseranksError) else DataError(f"{what} raised {describe_error(error)}")
        text = "".join(traceback.format_exception(error))
        return cls(encode(told), text[-_TRACEBACK_CHARACTERS:])

    def to_exception(self, process: str) -> CloseranksError:
        error = decode(self.error)
        error.__cause__ = RemoteTraceback(process, self.remote)
        return error


class RemoteTraceback(Exception):
    """The traceback of another process; stands as the cause of the error that it became here."""

    def __init__(self, process: str, text: str) -> None:
        super().__init__(process, text)
        self.process, self.text = process, text

    def __str__(self) -> str:
        return f"in {self.process}\n{self.text}"


class SocketClosed(Exception):
    """The other side is gone. Not an ``OSError``: the code of a dataset may raise those."""


def send(to: socket.socket, message: Any, *fds: int, flags: int = 0) -> None:
    """``BlockingIOError`` where it was told not to wait and there is no room."""
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    try:
        to.sendmsg([data], _rights(fds), flags)  # socket.send_fds forgets the flags
    except ConnectionError:
        raise SocketClosed from None


def receive(of: socket.socket, flags: int = 0) -> tuple[Any, list[int]]:
    """The next message and its descriptors; ``BlockingIOError`` where it was told not to wait and there is none."""
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
