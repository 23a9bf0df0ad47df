"""How is a loop started as its user starts it, and made to take turns? By its own launcher, and frozen in between.

Invariant: outside its turns no process of a lane runs, neither ranks nor launcher nor collector, so that none of them
works at the expense of another lane. Overdue work is done before a turn is timed.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from closeranks.core.errors import UserError

RANK = str(Path(__file__).with_name("telemetry_peers_rank.py"))
SETTLE_S = 0.3
_OPEN_S = 120.0


@dataclass(frozen=True, slots=True)
class LaneTurn:
    seconds: float
    """Of the slowest rank."""
    cpu_seconds: float
    """Of all processes of the lane: what other programs do on the machine does not add to it."""


class Lane:
    """Call sequence: the constructor returns when all ranks are ready; ``take`` for each turn; ``close``."""

    def __init__(self, name: str, plan: Mapping[str, Any], num_ranks: int, folder: Path) -> None:
        self.name, self._log = name, folder / f"{name}.log"
        path = str(folder / f"{name}.sock")
        with ExitStack() as stack, socket.socket(socket.AF_UNIX) as server:
            server.bind(path)
            server.listen()
            self._root = start({**plan, "socket": path}, num_ranks, folder / name, self._log)
            stack.callback(self._end)
            self._ranks = [stack.enter_context(self._accept(server)) for _ in range(num_ranks)]
            self._signal(signal.SIGSTOP)
            self._stack = stack.pop_all()

    def _accept(self, server: socket.socket) -> Any:
        """The lines to and from one rank."""
        server.settimeout(1.0)
        for _ in range(int(_OPEN_S)):
            with suppress(TimeoutError), server.accept()[0] as endpoint:
                return endpoint.makefile("rw")  # keeps the connection open
            if self._root.poll() is not None:
                break
        raise UserError(f"{self.name} did not start: {tail(self._log)}", "Run it by hand.")

    def take(self, num_steps: int) -> LaneTurn:
        self._signal(signal.SIGCONT)
        time.sleep(SETTLE_S)
        cpu_before = self._cpu_seconds()
        for rank in self._ranks:
            print(num_steps, file=rank, flush=True)
        answers = [rank.readline() for rank in self._ranks]
        cpu_seconds = self._cpu_seconds() - cpu_before
        self._signal(signal.SIGSTOP)
        if not all(answers):
            raise UserError(f"{self.name} broke down: {tail(self._log)}", "Run it by hand.")
        return LaneTurn(max(map(float, answers)), cpu_seconds)

    def close(self) -> None:
        self._stack.close()

    def _signal(self, number: signal.Signals) -> None:
        send_signal(self._root, number)

    def _cpu_seconds(self) -> float:
        spent = 0.0
        for process in processes(self._root):
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                spent += times.user + times.system
        return spent

    def _end(self) -> None:
        """Nobody needs what a launcher writes at the end, and frozen processes can be killed."""
        self._signal(signal.SIGKILL)
        self._root.wait()


def processes(root: psutil.Process) -> list[psutil.Process]:
    """A process and all its descendants."""
    with suppress(psutil.NoSuchProcess):
        return [root, *root.children(recursive=True)]
    return []


def send_signal(root: psutil.Process, number: signal.Signals) -> None:
    for process in processes(root):
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def start(plan: Mapping[str, Any], num_ranks: int, folder: Path, log: Path) -> psutil.Popen:
    """The launcher of a plan's loop: TraceML's or torchrun. What it prints goes to the log."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "plan.json"
    path.write_text(json.dumps({**plan, "folder": str(folder / "run")}))
    (folder / "run").mkdir()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", "")])
    launch = traceml_command if plan["traceml"] else torchrun_command
    with log.open("w") as output:
        return psutil.Popen(
            launch(path, num_ranks), stdout=output, stderr=output, stdin=subprocess.DEVNULL, env=environment, cwd=folder
        )


def torchrun_command(plan: Path, num_ranks: int) -> list[str]:
    """With the arguments that TraceML starts it with."""
    address = ["--master_addr=127.0.0.1", f"--master_port={free_port()}"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--node_rank=0"]
    return [*launcher, f"--nproc_per_node={num_ranks}", *address, RANK, str(plan)]


def traceml_command(plan: Path, num_ranks: int) -> list[str]:
    """``traceml run`` with its defaults: the report at the end, samples every two seconds."""
    ports = ["--master-port", str(free_port()), "--aggregator-port", str(free_port())]
    launcher = [sys.executable, "-m", "traceml_ai.launcher.cli", "run", RANK, "--nproc-per-node", str(num_ranks)]
    return [*launcher, *ports, "--logs-dir", str(plan.parent), "--run-name", "traceml", "--args", str(plan)]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def tail(log: Path) -> str:
    return log.read_text(errors="replace")[-800:]
