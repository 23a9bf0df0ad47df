"""Where a case takes place: a folder, a mount namespace and a /dev/shm of its own, and real command lines in it.

One process does one case (``python -m tests.hostile --case``): it adopts whatever its runs leave behind, and what it
mounts vanishes with it.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from closeranks.elastic.faults.disk import FillableDisk, mount_problem
from tests.cli.commands import IMPORTABLE
from tests.faults.agent_faults import AgentFault, encode
from tests.faults.machine import Machine
from tests.hostile import checks
from tests.hostile.cases import KINDS, Case
from tests.hostile.checks import Problem
from tests.hostile.jobs import ORDERS, PACE, SHAPES, write_job

TIMEOUT_S = 240.0
_SETTLE_S = 15.0
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


class Ended(Exception):
    """The run was over before a step that a case waited for."""


@dataclass(frozen=True)
class Done:
    """A command that is over."""

    code: int
    out: str
    err: str

    @property
    def said(self) -> str:
        return self.out + self.err


class Lab:
    def __init__(self, folder: Path, references: Path, shape: str = "pair") -> None:
        self.folder, self.shape = folder, shape
        self._references = references
        self.disk, self.orders, self.shm = folder / "disk", folder / "orders", folder / "shm"
        for path in (self.disk, self.orders, self.shm):
            path.mkdir(parents=True, exist_ok=True)
        self.job = write_job(folder)
        self.expected_children: set[int] = set()

    def isolate(self) -> FillableDisk | None:
        """Adopt orphans, end with the campaign; and where we may mount, have a small file system for the run folder."""
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if mount_problem():
            return None
        disk = FillableDisk(self.disk, "256m")
        disk.open()
        subprocess.run(["mount", "--bind", str(self.shm), "/dev/shm"], check=True)
        return disk

    @property
    def calm(self) -> Path:
        """Where the undisturbed run of this shape lies; the first who asks trains it."""
        return reference(self._references, self.shape)

    def copy_of_calm(self) -> Path:
        """The finished undisturbed run, as this case's own to spoil."""
        shutil.copytree(self.calm / "run", self.disk / "run", symlinks=True)
        return self.disk / "run"

    def env(self, **more: str) -> dict[str, str]:
        return {**os.environ, "OMP_NUM_THREADS": "1", **IMPORTABLE, ORDERS: str(self.orders), **more}

    def command(self, *words: object, timeout_s: float = TIMEOUT_S, cwd: Path | None = None) -> Done:
        """``closeranks WORDS`` to its end; a ``Problem`` where it has none."""
        line = [sys.executable, "-m", "closeranks", *map(str, words)]
        process = subprocess.Popen(
            line, cwd=cwd or self.folder, env=self.env(), text=True, errors="replace",
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            end_session(process)
            raise Problem(f"`closeranks {' '.join(map(str, words))[:160]}` has not ended in {timeout_s:g} s") from None
        return Done(process.returncode, out, err)

    def train(self, *settings: str, timeout_s: float = TIMEOUT_S) -> Done:
        how = SHAPES[self.shape]
        words = ["train", self.job, "-n", how.num_workers, f"layout={how.layout}", *settings]
        return self.command(*words, timeout_s=timeout_s)

    def check_nothing_left(self, machine: Machine | None = None) -> None:
        deadline = time.monotonic() + _SETTLE_S
        while left := [*checks.descendants(self.expected_children), *(machine.found(self.folder) if machine else ())]:
            if time.monotonic() > deadline:
                raise Problem(f"left behind: {left}")
            time.sleep(0.05)


def reference(root: Path, shape: str, *settings: str, name: str = "") -> Path:
    """The folder that holds ``run`` of an undisturbed run, made once for all processes of a campaign."""
    folder = root / (name or shape)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            shutil.rmtree(folder / "disk", ignore_errors=True)
            done = Lab(folder, root, shape).train(*settings)
            if done.code != 0 or not checks.last_states(folder / "disk"):
                raise Problem(f"the undisturbed run failed: {done.said[-600:]}")
            (folder / "done").touch()
    return folder / "disk"


def end_session(process: subprocess.Popen[str]) -> None:
    """SIGKILL to a command that we started in a session of its own; its agent takes the workers with it."""
    process.kill()
    process.wait()


@dataclass
class Run:
    """One run of the job that a live case disturbs, and what is expected of it."""

    lab: Lab
    settings: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    agent_faults: list[AgentFault] = field(default_factory=list)
    stdout: int | None = None
    stderr: int | None = None
    prefix: tuple[str, ...] = ()
    """A command that ends by becoming the run: ``nohup``, or a shell that closes something first."""
    terminal: int | None = None
    """The slave of a pty that becomes its controlling terminal."""
    allowed: set[int] = field(default_factory=lambda: {0})
    disk: FillableDisk | None = None
    _process: subprocess.Popen[str] | None = None
    _machine: Machine = field(default_factory=Machine)

    @property
    def process(self) -> subprocess.Popen[str]:
        assert self._process is not None
        return self._process

    @property
    def folder(self) -> Path:
        return self.lab.disk / "run"

    @property
    def said(self) -> str:
        return "".join((self.lab.folder / name).read_text(errors="replace") for name in ("out", "err"))

    def start(self) -> None:
        how = SHAPES[self.lab.shape]
        settings = [f"layout={how.layout}", *self.settings]
        words: list[object] = ["closeranks", "train", self.lab.job, "-n", how.num_workers, *settings]
        if self.agent_faults:
            agent_faults = encode(self.agent_faults)
            words = [
                "tests.faults.drive",
                self.lab.job,
                how.num_workers,
                ", ".join(self.faults),
                agent_faults,
                *settings,
            ]
        elif self.faults:
            words += ["--faults", ", ".join(self.faults)]
        terminal = self.terminal
        with (self.lab.folder / "out").open("w") as out, (self.lab.folder / "err").open("w") as err:
            self._process = subprocess.Popen(
                [*self.prefix, sys.executable, "-m", *map(str, words)],
                cwd=self.lab.folder,
                env=self.lab.env(**({PACE: "0.02", self._machine.mark: "1"} | self.environment)),
                stdin=subprocess.DEVNULL,
                stdout=out if self.stdout is None else self.stdout,
                stderr=err if self.stderr is None else self.stderr,
                start_new_session=terminal is None,
                preexec_fn=None if terminal is None else lambda: os.login_tty(terminal),
                text=True,
            )
        self._machine.pid = self._process.pid

    # --- steps

    def hold(self, step: int) -> None:
        """Call before the start: the run stands still after this step until it is released."""
        (self.lab.orders / f"hold-{step}").touch()

    @contextmanager
    def held(self, step: int) -> Iterator[None]:
        """The run stands still after that step, for as long as the block takes."""
        try:
            self.reach(step)
            yield
        finally:
            (self.lab.orders / f"release-{step}").touch()

    def reach(self, step: int) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not (self.lab.orders / f"done-{step}").exists():
            if self.process.poll() is not None:
                raise Ended(f"it ended with {self.process.returncode} before step {step}: {self.said[-500:]}")
            if time.monotonic() > deadline:
                raise Problem(f"it has not come to step {step} in {TIMEOUT_S:g} s: {self.said[-300:]}")
            time.sleep(0.005)

    def order(self, name: str) -> None:
        (self.lab.orders / name).touch()

    def wait(self) -> int:
        try:
            return self.process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise Problem(f"it has not ended in {TIMEOUT_S:g} s: {self.said[-400:]}") from None
        finally:
            end_session(self.process)

    # --- the judgement

    def judge(self) -> None:
        """Ended as promised, without a trace; and it, or the next start in its place, reaches the undisturbed state."""
        code = self.process.returncode
        out, err = ((self.lab.folder / name).read_text(errors="replace") for name in ("out", "err"))
        checks.check_words(out, err, code if self.stderr is None and self.terminal is None else 0)
        checks.check_code(code, self.allowed, self.said)
        self.lab.check_nothing_left(self._machine)
        if code != 0:
            self.go_on()
        checks.check_last_state(self.lab.calm, self.lab.disk)

    def go_on(self) -> None:
        """The same command once more, as a scheduler would: nothing that the first left is in its way."""
        for order in self.lab.orders.glob("hold-*"):
            order.unlink()
        done = self.lab.train(*self.settings, "checkpoint.resume=auto")
        checks.check_words(done.out, done.err, done.code)
        checks.check_code(done.code, {0}, f"started again: {done.said}")


def play(lab: Lab, case: Case, disk: FillableDisk | None) -> None:
    """Do what a case says, and raise a ``Problem`` where anything is not as it must be."""
    blow = case.blows[0]
    if not KINDS[blow.kind].is_live:
        KINDS[blow.kind].act(lab, **blow.parameters)
        lab.check_nothing_left()
        return
    run = Run(lab, disk=disk)
    acts: list[Generator[None]] = [KINDS[blow.kind].act(run, **blow.parameters) for blow in case.blows]
    for act in acts:
        next(act)
    run.start()
    _all_at_once(acts, is_single=len(acts) == 1)
    run.wait()
    for act in acts:
        next(act, None)
    run.judge()


def _all_at_once(acts: Sequence[Generator[None]], is_single: bool) -> None:
    """Everybody's middle part, each in a thread; one of two may find the run ended by the other."""
    raised: list[Exception] = []

    def go(act: Generator[None]) -> None:
        try:
            next(act, None)
        except Ended as error:
            if is_single:
                raised.append(Problem(str(error)))
        except Exception as error:
            raised.append(error)

    threads = [threading.Thread(target=go, args=(act,)) for act in acts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if raised:
        raise raised[0]


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        raise Ended(f"process {pid} was gone before") from None
