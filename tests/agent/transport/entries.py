"""Programs that tests start as processes of their own: a lead that echoes, and hosts that call it.

Run as ``python -m tests.agent.transport.entries ROLE JSON``; the token comes by file, what happens is told on stdout.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from closeranks.agent.event_loop import EventLoop
from closeranks.agent.transport.channel_limits import ChannelLimits
from closeranks.agent.transport.client import ControlClient
from closeranks.agent.transport.connection import ControlConnection
from closeranks.agent.transport.server import ControlServer
from closeranks.agent.transport.token import JobToken, read_token


def say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def lead(token: JobToken, host: str = "127.0.0.1", port: int = 0, limits: dict[str, Any] | None = None) -> None:
    """Sends back what it hears, for ever."""
    with EventLoop() as loop:
        server = ControlServer(
            loop,
            host,
            port,
            token=token,
            on_open=lambda connection: say(opened=str(connection.remote_address)),
            on_message=lambda connection, fields: connection.send(fields) and None,
            on_close=lambda connection, why: say(closed=str(connection.remote_address), why=why, at=time.monotonic()),
            on_note=lambda text: say(note=text),
            limits=ChannelLimits(**limits or {}),
        )
        say(address=str(server.address))
        while True:
            loop.run_once(server.deadline)
            server.wake()


def hosts(token: JobToken, address: str, count: int, messages: int, text_bytes: int = 10, window: int = 1) -> None:
    """``count`` callers; each sends ``messages`` that carry its name, at most ``window`` ahead of the echo."""
    waits: list[float] = []
    sent: dict[ControlConnection, list[tuple[int, float]]] = {}
    wrong: list[Any] = []
    notes: list[str] = []
    text = "x" * text_bytes

    def go_on(connection: ControlConnection, number: int) -> None:
        if number < messages:
            sent[connection].append((number, time.perf_counter()))
            connection.send({"name": id(connection), "number": number, "text": text})

    def open_(connection: ControlConnection) -> None:
        sent[connection] = []
        for number in range(window):
            go_on(connection, number)

    def hear(connection: ControlConnection, fields: dict[str, Any]) -> None:
        number, at = sent[connection].pop(0)
        waits.append(time.perf_counter() - at)
        if (fields["name"], fields["number"]) != (id(connection), number):
            wrong.append(fields)
        go_on(connection, number + window)

    def close(connection: ControlConnection, why: str) -> None:
        wrong.append(why)

    with EventLoop() as loop:
        clients = [
            ControlClient(
                loop, address, token, on_open=open_, on_message=hear, on_close=close, on_note=notes.append, seed=number
            )
            for number in range(count)
        ]
        began = time.perf_counter()
        while len(waits) < count * messages and not wrong:
            loop.run_once(min((at for client in clients if (at := client.deadline) is not None), default=None))
            for client in clients:
                client.wake()
        took_s = time.perf_counter() - began
        for client in clients:
            client.close()
    waits.sort()
    half, most = (waits[len(waits) * share // 100] if waits else 0.0 for share in (50, 99))
    say(heard=len(waits), wrong=wrong, notes=notes, took_s=took_s, median_s=half, worst_s=most)


def stay(token: JobToken, address: str) -> None:
    """Joins and does nothing more."""
    with EventLoop() as loop:
        client = ControlClient(
            loop,
            address,
            token,
            on_open=lambda connection: say(opened=str(connection.remote_address)),
            on_message=lambda connection, fields: None,
            on_close=lambda connection, why: say(closed=why),
            on_note=lambda text: say(note=text),
        )
        while True:
            loop.run_once(client.deadline)
            client.wake()


if __name__ == "__main__":
    role, settings = sys.argv[1], json.loads(sys.argv[2])
    token = read_token(Path(settings.pop("token_file")), lambda note: None)
    {"lead": lead, "hosts": hosts, "stay": stay}[role](token, **settings)
