"""A network switch that delays every frame, since not every kernel has netem.

    python delay_switch.py --delay-ms 10 p0 p1 ...      inside the namespace where the ports are

A separate program that uses only the standard library and is started by its path. Frames are received and sent with
the kernel's header about checksums and segments (PACKET_VNET_HDR), so that large ones are forwarded as they are and no
offload has to be disabled on the hosts. Invariants: the frames of a port keep their order; a frame goes to the port
where its address was last seen, or to all others. The bandwidth is limited by the queues of the ports (tbf), not here.
"""

from __future__ import annotations

import argparse
import select
import socket
import time
from collections import deque
from contextlib import suppress

_SOL_PACKET, _VNET_HDR, _IGNORE_OUTGOING = 263, 15, 23
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33
_ALL_PROTOCOLS = 3
_BUFFER_BYTES = 64 << 20
_HEADER_BYTES = 10
"""Bytes of the kernel's header before each frame."""
_MAX_FRAME_BYTES = 1 << 17
_AT_ONCE = 64

DelayedFrame = tuple[float, socket.socket, bytes]


def open_port(name: str) -> socket.socket:
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    port.setsockopt(_SOL_PACKET, _VNET_HDR, 1)
    port.setsockopt(_SOL_PACKET, _IGNORE_OUTGOING, 1)
    for option in (_SO_SNDBUFFORCE, _SO_RCVBUFFORCE):
        port.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
    port.bind((name, _ALL_PROTOCOLS))
    port.setblocking(False)
    return port


class DelaySwitch:
    def __init__(self, ports: list[socket.socket], delay_s: float) -> None:
        self._ports = {port.fileno(): port for port in ports}
        self._delay_s = delay_s
        self._seen_at: dict[bytes, socket.socket] = {}
        self._queue: deque[DelayedFrame] = deque()
        self._poll = select.epoll()
        for number in self._ports:
            self._poll.register(number, select.EPOLLIN)

    def run(self) -> None:
        while True:
            wait_s = max(0.0, self._queue[0][0] - time.monotonic()) if self._queue else 1.0
            for number, _ in self._poll.poll(wait_s):
                self._receive(self._ports[number])
            self._send_due()

    def _receive(self, port: socket.socket) -> None:
        for _ in range(_AT_ONCE):
            try:
                frame = port.recv(_MAX_FRAME_BYTES)
            except OSError:  # nothing more, or the port is gone
                return
            self._seen_at[frame[_HEADER_BYTES + 6 : _HEADER_BYTES + 12]] = port
            self._queue.append((time.monotonic() + self._delay_s, port, frame))

    def _send_due(self) -> None:
        """Send the frames that are due. All have the same delay, so they are due in the order in which they arrived."""
        while self._queue and self._queue[0][0] <= time.monotonic():
            _, source, frame = self._queue.popleft()
            target = self._seen_at.get(frame[_HEADER_BYTES : _HEADER_BYTES + 6])
            for port in [target] if target is not None else self._ports.values():
                if port is not source:
                    self._send(port, frame)

    def _send(self, port: socket.socket, frame: bytes) -> None:
        """A full queue drops the frame, as on a real link; TCP sends it again."""
        with suppress(OSError):
            port.send(frame)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ports", nargs="+")
    parser.add_argument("--delay-ms", type=float, default=0.0)
    arguments = parser.parse_args()
    switch = DelaySwitch([open_port(name) for name in arguments.ports], arguments.delay_ms / 1000)
    print("up", flush=True)
    switch.run()


if __name__ == "__main__":
    main()
