"""DNS lookup in a child process, because a name server that does not answer would block the agent's event loop.

Invariant: nothing here blocks; when a lookup is closed, its process has been killed and reaped.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from closeranks.agent.event_loop import EventLoop

_LOOKUP_CODE = """
import json, socket, sys
try:
    found = socket.getaddrinfo(sys.argv[1], int(sys.argv[2]), type=socket.SOCK_STREAM)
    print(json.dumps([[int(family), list(address)] for family, _, _, _, address in found]))
except (OSError, UnicodeError) as error:
    print(json.dumps(getattr(error, "strerror", None) or "not a name"))
"""
_MOST_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class SocketAddress:
    """An address that a socket can connect to."""

    family: socket.AddressFamily
    address: tuple[Any, ...]


def numeric_addresses(host: str, port: int) -> list[SocketAddress]:
    """The addresses of a numeric host; empty for a name. Sends no query."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except (OSError, UnicodeError):
        return []
    return [SocketAddress(family, address) for family, _, _, _, address in found]


class DnsLookup:
    """One query. ``on_done(addresses, why)`` is called from the event loop; ``why``: the reason for no addresses."""

    def __init__(
        self, loop: EventLoop, host: str, port: int, on_done: Callable[[list[SocketAddress], str], None]
    ) -> None:
        self._loop = loop
        self._on_done = on_done
        self._answer = bytearray()
        self._reader, writer = os.pipe()
        command = [sys.executable, "-I", "-S", "-c", _LOOKUP_CODE, host, str(port)]
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=writer, stderr=subprocess.DEVNULL, start_new_session=True
            )
        except BaseException:
            os.close(self._reader)
            raise
        finally:
            os.close(writer)
        loop.watch(self._reader, self._read)

    def close(self) -> None:
        """Also cancels a lookup that is still running."""
        if self._process.returncode is not None:
            return
        self._loop.unwatch(self._reader)
        os.close(self._reader)
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL)
        self._process.wait()  # brief: it was killed

    def _read(self) -> None:
        """Collect the output until end of file, which comes when the process ends."""
        if self._process.returncode is not None:  # closed earlier in this iteration; its descriptor may be reused
            return
        data = os.read(self._reader, _MOST_BYTES)
        self._answer += data
        if not data or len(self._answer) > _MOST_BYTES:
            self.close()
            self._on_done(*decode_answer(bytes(self._answer)))


def decode_answer(answer: bytes) -> tuple[list[SocketAddress], str]:
    """The addresses that were found, or why there are none."""
    try:
        found = json.loads(answer)
    except ValueError:
        return [], "the lookup gave no result"
    if isinstance(found, str):
        return [], found
    return [SocketAddress(socket.AddressFamily(family), tuple(address)) for family, address in found], ""
