"""Hosts for a comparison: links of a real width and delay, and nothing left of them afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from closeranks.lab.compare.config import NetworkConfig
from closeranks.lab.compare.namespaces import NamespaceHost, NamespaceHosts, unavailable_reason
from tests.cli.compare.jobs import HEAD, JOB, write
from tests.cli.compare.test_compare import compare, told

pytestmark = [
    pytest.mark.hosts,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(unavailable_reason(shaped=True)), reason=unavailable_reason(shaped=True) or "possible"),
]
_SERVE = (
    "import socket; server = socket.create_server(('', 5000)); print('up', flush=True)\n"
    "caller, _ = server.accept()\nwhile caller.recv(1 << 20): pass\ncaller.send(b'.')"
)
_SEND = (
    "import socket, sys, time; link = socket.create_connection((sys.argv[1], 5000)); began = time.monotonic()\n"
    "link.sendall(bytes(int(sys.argv[2]))); link.shutdown(1); link.recv(1); print(time.monotonic() - began)"
)
_KNOCK = (
    "import socket, sys, time\nfor _ in range(2):\n  began = time.monotonic()\n"
    "  try: socket.create_connection((sys.argv[1], 9), 5)\n  except ConnectionRefusedError: pass\n"
    "print(time.monotonic() - began)"
)


def python(host: NamespaceHost, folder: Path, text: str, *words: object) -> tuple[subprocess.Popen[str], Path]:
    path = folder / f"{host.name}.txt"
    with path.open("w") as output:
        return host.start([sys.executable, "-c", text, *map(str, words)], output), path


def number(process: subprocess.Popen[str], path: Path) -> float:
    assert process.wait(timeout=300) == 0, path.read_text()
    return float(path.read_text())


def send(hosts: NamespaceHosts, folder: Path, num_bytes: int) -> float:
    """Seconds for so many bytes from the first host to the second."""
    first, second = hosts.hosts
    _, ready = python(second, folder, _SERVE)
    deadline = time.monotonic() + 30
    while "up" not in ready.read_text():
        assert time.monotonic() < deadline
    return number(*python(first, folder, _SEND, second.address, num_bytes))


def test_a_link_is_as_wide_as_was_asked_for_and_its_bytes_are_counted(tmp_path: Path) -> None:
    with NamespaceHosts(NetworkConfig(hosts=2, mbit=80.0)) as hosts:
        before = hosts.sent_bytes()
        seconds = send(hosts, tmp_path, 10_000_000)
        assert seconds > 0.97, "10 MB at 10 MB/s; what fits the queue's burst comes at once"
        assert seconds < 30.0  # not a tenth as wide; one second of it where nothing else runs
        sent = hosts.sent_bytes() - before
        assert 10_000_000 < sent < 13_000_000, "with headers, and what TCP sends again on a busy machine"


def test_a_packet_takes_as_long_as_was_asked_for(tmp_path: Path) -> None:
    with NamespaceHosts(NetworkConfig(hosts=2, mbit=80.0, delay_ms=30.0)) as hosts:
        first, second = hosts.hosts
        there_and_back = number(*python(first, tmp_path, _KNOCK, second.address))
        assert 0.06 <= there_and_back < 3.0  # a delay of seconds would be another one; the rest is a busy machine's
        assert 0.97 < send(hosts, tmp_path, 10_000_000) < 30.0


def test_nothing_is_left(tmp_path: Path) -> None:
    own = os.readlink("/proc/self/ns/net")
    with NamespaceHosts(NetworkConfig(hosts=3, mbit=10.0, delay_ms=1.0)) as hosts:
        inits = [host.init_pid for host in hosts.hosts]
        spaces = {os.readlink(f"/proc/{pid}/ns/net") for pid in inits}
        assert len(spaces) == 3
        assert own not in spaces
        process, _ = python(hosts.hosts[1], tmp_path, "import time; time.sleep(600)")
    assert process.wait(timeout=60) != 0
    assert [pid for pid in inits if Path(f"/proc/{pid}").exists()] == []
    assert "p0" not in Path("/proc/net/dev").read_text()


def test_nothing_is_left_of_one_who_is_killed() -> None:
    program = (
        "from closeranks.lab.compare.namespaces import *\n"
        "with NamespaceHosts(NetworkConfig(hosts=2, mbit=10.0, delay_ms=1.0)) as hosts:\n"
        "    print(*(host.init_pid for host in hosts.hosts), flush=True)\n    signal.pause()"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        inits = [int(word) for word in process.stdout.readline().split()]
        assert all(Path(f"/proc/{pid}").exists() for pid in inits)
        process.kill()
    assert len(inits) == 2
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in inits):
        assert time.monotonic() < deadline


def test_a_step_is_bound_by_the_width_of_the_link(tmp_path: Path) -> None:
    """At 50 Mbit/s the gradients of half a million numbers take most of a second, in each direction at once."""
    job = JOB.replace("dim = 32", "dim = 64").replace("steps = 12", "steps = 6")
    narrow = '[[setting]]\nname = "plain"\n[network]\nhosts = 2\nmbit = 50.0\n'
    done = compare(write(tmp_path, HEAD + narrow, job), "seeds=[0]", cwd=tmp_path)
    assert (done.code, done.left_behind) == (0, []), done.out
    (run,) = told(tmp_path / "out")["settings"][0]["runs"]
    one_way = run["bytes_per_step"] / 2
    assert one_way > 1_500_000
    assert 1 / run["steps_per_s"] > 0.95 * one_way * 8 / 50e6
    assert 1 / run["steps_per_s"] < 4 * one_way * 8 / 50e6
