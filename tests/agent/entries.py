"""What the workers of these tests do. Torch-free; imported in the zygote under the name ``entries``."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from closeranks.agent.detection.progress import WorkerPhase
from closeranks.agent.workers.store_socket import store_address
from closeranks.agent.workers.worker_link import WorkerLink
from closeranks.core.errors import DataError
from closeranks.core.requests import DRAIN
from closeranks.core.system.environment import detect_world

Payload = dict[str, Any]


def announce(link: WorkerLink, **more: Any) -> None:
    link.send_event({"event": "ready", "pid": os.getpid(), **more})


def wait_forever() -> None:
    threading.Event().wait()


def finish(payload: Payload, link: WorkerLink) -> None:
    announce(link, world=[link.world.rank, link.world.size, link.world.launcher], payload=payload)
    if link.world.is_lead:
        with link.listen_socket() as listener:
            link.announce_store(store_address(listener))
            link.send_event({"event": "store", "address": link.wait_for_store()})
    else:
        link.send_event({"event": "store", "address": link.wait_for_store()})


def meet_twice(payload: Payload, link: WorkerLink) -> None:
    """As a script with two sessions does: each has a store of its own, and the first is over when the second begins."""
    is_met = Path(payload["folder"], "met")
    for name in ("first", "second"):
        while name == "second" and link.world.is_lead and not is_met.exists():
            time.sleep(0.01)
        if link.world.is_lead:
            with link.listen_socket() as listener:
                link.announce_store(store_address(listener))
        link.send_event({"event": name, "address": link.wait_for_store()})
        if not link.world.is_lead:
            is_met.touch()


def describe_self(payload: Payload, link: WorkerLink) -> None:
    handler = signal.getsignal(signal.SIGINT)
    link.send_event(
        {
            "fds": sorted(os.readlink(f"/proc/self/fd/{fd}").split(":")[0] for fd in (0, 1, 2)),
            "num_fds": len(os.listdir("/proc/self/fd")) - 1,
            "session": os.getsid(0),
            "ignores_sigint": handler is signal.SIG_IGN,
            "detected": [detect_world().launcher, detect_world().rank],
            "argv": len(sys.argv),
            "parent": os.getppid(),
        }
    )


def say(payload: Payload, link: WorkerLink) -> None:
    print(f"rank {link.world.rank} says grüß")
    print("on stderr", file=sys.stderr)
    os.write(1, b"no newline at the end")


def stumble(payload: Payload, link: WorkerLink) -> None:
    """Rank 1 raises at step 7; the others never would."""
    link.progress(7, WorkerPhase.COMPUTE)
    if link.world.rank == 1:
        raise ValueError("the loss is a banana")
    wait_forever()


def leave(payload: Payload, link: WorkerLink) -> int | None:
    """Each rank by its own way out, as the payload has it."""
    way, status = payload["ways"][link.world.rank]
    if way == "sys.exit":
        sys.exit(status)
    if way == "os._exit":
        os._exit(status)
    if way == "return":
        return int(status)
    wait_forever()
    return None


def die(payload: Payload, link: WorkerLink) -> None:
    """Rank 1 dies of the payload's signal at step 12; the others find their peer gone and say so."""
    link.progress(12, WorkerPhase.REDUCE)
    fifo = Path(payload["folder"]) / f"fifo-{link.world.rank}"
    if link.world.rank != 1:
        with fifo.open("rb") as peer:
            link.send_event({"event": "peer lost", "read": peer.read().decode()})
        raise RuntimeError("[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711")
    writers = [path.open("wb") for path in Path(payload["folder"]).glob("fifo-*")]
    print("my last words")
    if payload["signal"] == "SIGSEGV":
        ctypes.string_at(0)
    os.kill(os.getpid(), signal.Signals[payload["signal"]])
    del writers


def hang(payload: Payload, link: WorkerLink) -> None:
    """Deaf to everything, as a stuck collective is."""
    for event in payload.get("before", ()):
        link.send_event(event)
    announce(link)
    wait_forever()


def print_much(payload: Payload, link: WorkerLink) -> None:
    """Steps of a few milliseconds, then one in which rank 0 prints for much longer than that, and is healthy."""
    for step in range(1, 30):
        link.progress(step, WorkerPhase.COMPUTE)
        time.sleep(0.005)
        link.progress(step, WorkerPhase.UPDATE)
    link.progress(30, WorkerPhase.COMPUTE)
    if link.world.is_lead:
        piece = str(payload["piece"]).encode()
        left = memoryview(piece * (int(payload["num_bytes"]) // len(piece)))
        while left:
            left = left[os.write(1, left[: 1 << 16]) :]
    link.progress(30, WorkerPhase.END)
    link.send_event({"event": "printed"})


def show_title(payload: Payload, link: WorkerLink) -> None:
    def title(pid: int) -> str:
        return Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").decode()

    link.send_event({"event": "titles", "titles": [title(os.getpid()), title(os.getppid())]})


def leave_daemons(payload: Payload, link: WorkerLink) -> None:
    """As code does that starts a server and forgets it; one of them does not end when it is asked to."""
    quiet = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    daemon = os.fork()
    if daemon == 0:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        Path(payload["folder"], "is_deaf").touch()
        wait_forever()
    while not Path(payload["folder"], "is_deaf").exists():
        time.sleep(0.01)
    link.send_event({"event": "left", "pids": [quiet.pid, daemon]})


def drain(payload: Payload, link: WorkerLink) -> None:
    """Trains until it is asked to stop, then saves."""
    announce(link)
    step = 0
    while DRAIN not in link.poll():
        step += 1
        link.progress(step, WorkerPhase.COMPUTE)
        threading.Event().wait(0.001)
    link.send_event({"event": "saved"})


def fail_to_save(payload: Payload, link: WorkerLink) -> None:
    announce(link)
    while DRAIN not in link.poll():
        threading.Event().wait(0.001)
    raise OSError(28, "No space left on device")


def flood(payload: Payload, link: WorkerLink) -> None:
    for index in range(payload["num_events"]):
        link.send_event({"index": index, "text": "x" * 64})


def misuse(payload: Payload, link: WorkerLink) -> None:
    """The same mistake of the user's on every rank, or on one."""
    if payload["ranks"] == "all" or link.world.rank in payload["ranks"]:
        raise DataError("the folder /nowhere holds no data", "Set data.path to a folder that does.")
    wait_forever()


def bind(payload: Payload, link: WorkerLink) -> None:
    if link.world.is_lead:
        link.listen_socket()
    link.wait_for_store()


def bear(payload: Payload, link: WorkerLink) -> None:
    """A worker with a process of its own, which nobody told about ends."""
    child = subprocess.Popen([sys.executable, "-c", "import threading; threading.Event().wait()"])
    announce(link, child=child.pid)
    wait_forever()


def fork_child(payload: Payload, link: WorkerLink) -> None:
    """A forked child of a worker, as a data loader's is, can be ended by SIGTERM and leaves the link alone."""
    pid = os.fork()
    if pid == 0:
        wait_forever()
    os.kill(pid, signal.SIGTERM)
    _, status = os.waitpid(pid, 0)
    link.send_event({"ended_by": os.WTERMSIG(status), "drain": DRAIN in link.poll()})


def announce_after_a_death(payload: Payload, link: WorkerLink) -> None:
    """Rank 1 makes its mistake and is gone before rank 0 tells everybody where the store is."""
    note = Path(payload["note"])
    if not link.world.is_lead:
        note.with_suffix(".tmp").write_text(str(os.getpid()))
        note.with_suffix(".tmp").rename(note)
        raise DataError("there is nothing to read")
    while not note.exists() or Path(f"/proc/{note.read_text()}").exists():
        os.sched_yield()
    link.announce_store("127.0.0.1:1")
    wait_forever()
