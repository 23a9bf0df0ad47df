"""Lead and hosts as processes of their own, some of which are killed, stopped or cut off."""

from __future__ import annotations

import json
import os
import re
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from closeranks.agent.transport.token import JobToken, generate_token

from .stage import FAST, Stage

pytestmark = pytest.mark.world


class Program:
    """One process and what it says."""

    def __init__(self, role: str, token_file: Path, prefix: Sequence[str] = (), **settings: Any) -> None:
        command = [sys.executable, "-m", "tests.agent.transport.entries", role]
        self.process = subprocess.Popen(
            [*prefix, *command, json.dumps({"token_file": str(token_file), **settings})],
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[3],
        )

    def hear(self, name: str, within_s: float = 240.0) -> dict[str, Any]:
        """The next thing it says that has this name."""
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            limit = time.monotonic() + within_s
            while selector.select(limit - time.monotonic()):
                said: dict[str, Any] = json.loads(self.process.stdout.readline() or "{}")
                if name in said or not said:
                    return said
        raise AssertionError(f"it did not say '{name}' in time")

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


class Cast:
    """Starts programs that share a token, and ends them."""

    def __init__(self, folder: Path) -> None:
        self.token_file = folder / "token"
        self.token: JobToken = generate_token(self.token_file)
        self.programs: list[Program] = []

    def start(self, role: str, prefix: Sequence[str] = (), **settings: Any) -> Program:
        self.programs.append(Program(role, self.token_file, prefix, **settings))
        return self.programs[-1]

    def lead(self, **settings: Any) -> tuple[Program, str]:
        lead = self.start("lead", **settings)
        return lead, lead.hear("address")["address"]


@pytest.fixture
def cast(tmp_path: Path) -> Iterator[Cast]:
    cast = Cast(tmp_path)
    yield cast
    for program in cast.programs:
        program.end()


def test_fifty_hosts_at_once_each_hear_their_own(cast: Cast) -> None:
    _, address = cast.lead()
    programs = [cast.start("hosts", address=address, count=25, messages=20) for _ in range(2)]
    for program in programs:
        told = program.hear("heard")
        assert (told["heard"], told["wrong"], told["notes"]) == (25 * 20, [], [])
        assert program.process.wait(60) == 0


def test_fifty_hosts_get_in_and_go_on_while_strangers_shout(cast: Cast) -> None:
    """From the same address, and with few places: some have to come twice, none is disturbed once it is in."""
    lead, address = cast.lead(limits={"max_unauthenticated": 16})
    host, port = address.split(":")
    program = cast.start("hosts", address=address, count=50, messages=40, window=4)
    num_calls = 0
    while program.process.poll() is None and num_calls < 3000:
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall((b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01" + bytes(600), b"closeranks-")[num_calls % 3])
        num_calls += 1
    result = program.hear("heard")
    assert (result["heard"], result["wrong"]) == (2000, [])
    assert num_calls > 10
    assert lead.process.poll() is None


def test_a_killed_host_is_told_of_at_once_and_the_lead_goes_on(cast: Cast) -> None:
    lead, address = cast.lead()
    host = cast.start("stay", address=address)
    where = lead.hear("opened")["opened"]
    host.process.kill()
    told = lead.hear("closed", 5.0)
    assert (told["closed"], told["why"]) == (where, "closed the connection")
    again = cast.start("stay", address=address)
    again.hear("opened")


def test_a_killed_lead_is_told_to_its_hosts(cast: Cast) -> None:
    lead, address = cast.lead()
    host = cast.start("stay", address=address)
    host.hear("opened")
    lead.process.kill()
    assert host.hear("closed")["closed"] == "closed the connection"
    assert "nothing listens there" in host.hear("note")["note"]
    lead.process.wait()
    cast.lead(port=int(address.split(":")[1]))
    host.hear("opened")


def test_a_stopped_host_that_does_not_read_is_closed(stage: Stage, cast: Cast) -> None:
    server, heard = stage.server(cast.token)
    program = cast.start("stay", address=str(server.address))
    stage.until(lambda: heard.opened)
    program.process.send_signal(signal.SIGSTOP)
    message = {"text": "x" * 1_000_000}
    num_sent = 0
    while heard.opened[0].send(message):
        num_sent += 1
        assert num_sent < 100
    stage.until(lambda: heard.closed)
    assert "does not read" in heard.closed[0][1]


def test_a_real_http_client_and_openssl_are_refused(stage: Stage) -> None:
    """Not bytes we made up: the programs themselves."""
    server, heard = stage.server(limits=FAST)
    url = f"http://{server.address}/"
    fetch = f"import urllib.request as u\ntry: u.urlopen({url!r}, timeout=10)\nexcept OSError: pass"
    commands = [[sys.executable, "-c", fetch]]
    if shutil.which("openssl"):
        commands.append(["openssl", "s_client", "-connect", str(server.address)])
    for command in commands:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        ended = os.pidfd_open(process.pid)
        stage.loop.watch(ended, lambda ended=ended: stage.loop.unwatch(ended))
        stage.until(lambda process=process: process.poll() is not None)
        os.close(ended)
    stage.until(lambda: not server._unauthenticated)
    assert (heard.opened, heard.messages, len(heard.notes)) == ([], [], 1)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def _num_unanswered(name: str) -> int:
    """Bytes that the other kernels have not acknowledged, over the connections of a namespace."""
    command = ["ip", "netns", "exec", name, "cat", "/proc/net/tcp"]
    rows = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[1:]
    return sum(int(row.split()[4].split(":")[0], 16) for row in rows)


@pytest.fixture
def two_hosts() -> Iterator[tuple[str, str]]:
    """Two network namespaces with a cable between them."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces take root and ip")
    names = (f"crc{os.getpid()}a", f"crc{os.getpid()}b")
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", "eth0", "netns", names[0], "type", "veth", "peer", "name", "eth0", "netns", names[1])
        for number, name in enumerate(names, 1):
            _ip("-n", name, "addr", "add", f"10.91.0.{number}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


@pytest.mark.hosts
@pytest.mark.parametrize("is_talking", [True, False])
def test_a_host_whose_cable_is_cut_is_given_up(cast: Cast, two_hosts: tuple[str, str], is_talking: bool) -> None:
    """Nothing closes the connection: whether data waits for an answer or none was sent, the kernel gives it up."""
    here, there = two_hosts
    lead, address = cast.lead(host="10.91.0.1", prefix=("ip", "netns", "exec", here), limits={"silence_s": 2.0})
    settings = {"count": 1, "messages": 10_000_000, "window": 4} if is_talking else {}
    cast.start("hosts" if is_talking else "stay", ("ip", "netns", "exec", there), address=address, **settings)
    where = lead.hear("opened")["opened"]
    assert where.startswith("10.91.0.2:")
    while not is_talking and _num_unanswered(here):  # or what still waits for an answer would be what is noticed
        continue
    _ip("-n", there, "link", "set", "eth0", "down")
    cut_at = time.monotonic()
    told = lead.hear("closed", 20.0)
    assert told["closed"] == where
    assert re.search("does not answer any more|cannot be reached any more", told["why"])
    assert told["at"] - cut_at < 8.0


@pytest.mark.slow
@pytest.mark.parametrize(("text_bytes", "window"), [(10, 1), (10, 64), (10_000, 64)])
def test_speed_on_loopback(cast: Cast, text_bytes: int, window: int) -> None:
    """Round trips between two processes; run with -s to see the figures."""
    _, address = cast.lead()
    program = cast.start("hosts", address=address, count=1, messages=20_000, text_bytes=text_bytes, window=window)
    told = program.hear("heard")
    assert told["wrong"] == []
    rate = told["heard"] / told["took_s"]
    print(
        f"\n{text_bytes} bytes, {window} under way: {rate:.0f} round trips/s,"
        f" median {told['median_s'] * 1e6:.0f} us, 99 % {told['worst_s'] * 1e6:.0f} us"
    )
    assert rate > 100
