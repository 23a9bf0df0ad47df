"""A real Slurm of our own: munged, slurmctld and two slurmd, all on loopback, with every file in one folder.

Invariant: when it is down, no process and no file outside its folder is left of it; the daemons do not outlive the
process that started them either, however that one ends.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil

from tests.launchers.jobs import ROOT, environment

NODES = ("n1", "n2")
_PATIENCE_S = 30.0

_SLURM_CONF = """
ClusterName=closeranks
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
SlurmctldHost={host}(127.0.0.1)
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
SlurmctldPort={port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,sched_min_interval=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
KillWait=30
SlurmdTimeout=30
ReturnToService=2
MpiDefault=none
{nodes}
PartitionName=main Nodes={names} Default=YES MaxTime=INFINITE State=UP
"""
_NODE_CONF = (
    "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 Boards=1 SocketsPerBoard=1 "
    "CoresPerSocket=2 ThreadsPerCore=1 RealMemory=1000 State=UNKNOWN"
)
# slurmd loads a cgroup plugin whether or not anything is constrained by it.
_CGROUP_CONF = "CgroupPlugin={plugin}\nCgroupMountpoint=/sys/fs/cgroup\nConstrainCores=no\nConstrainRAMSpace=no\n"


def why_not() -> str:
    """What this machine lacks for a Slurm of its own, if anything."""
    missing = [name for name in ("munged", "slurmctld", "slurmd", "srun", "setpriv") if not _program(name)]
    if missing:
        return f"{', '.join(missing)} not installed; tests/servers.sh installs them when root on Debian"
    return "" if os.geteuid() == 0 else "slurmd must be started by root"


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


@dataclass(frozen=True)
class Done:
    """What became of a command, both its streams together as a terminal shows them."""

    code: int
    text: str

    def task_codes(self) -> dict[int, int]:
        """The exit status of each task, from what srun says of those that failed."""
        found = re.findall(r"srun: error: \w+: tasks? ([\d,-]+): Exited with exit code (\d+)", self.text)
        return {task: int(code) for tasks, code in found for task in _numbers(tasks)}


def _numbers(text: str) -> list[int]:
    ends = [[int(end) for end in part.split("-")] for part in text.split(",")]
    return [number for end in ends for number in range(end[0], end[-1] + 1)]


class Cluster:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        try:
            self._write()
            self._start("munged")
            wait_for(lambda: (self.folder / "munge.socket").exists(), self._last_words)
            self._start("slurmctld")
            for name in NODES:
                self._start("slurmd", name)
            wait_for(lambda: self._ask("sinfo", "-h", "-t", "idle", "-o", "%D") == str(len(NODES)), self._last_words)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if len(self._daemons) > 1:
            self._ask("scancel", "--user=root")
            wait_for(lambda: self.is_idle, self._last_words)
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        wait_for(lambda: not self.processes(), lambda: f"left behind: {self.processes()}")
        left = list(self.folder.glob("*.pid"))
        assert not left, f"left behind: {left}"

    @property
    def is_idle(self) -> bool:
        return self._ask("squeue", "-h") == ""

    @property
    def environment(self) -> dict[str, str]:
        return environment(SLURM_CONF=str(self.folder / "slurm.conf"))

    def srun(self, *arguments: object, **variables: str) -> Done:
        process = self.start(*arguments, **variables)
        try:
            text, _ = process.communicate(timeout=300)
        finally:
            end(process)
        return Done(process.returncode, text)

    def start(self, *arguments: object, **variables: str) -> subprocess.Popen[str]:
        """An srun that goes on while the test does something to it."""
        return subprocess.Popen(
            ["srun", *map(str, arguments)],
            cwd=ROOT,
            env={**self.environment, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def sbatch(self, *arguments: object) -> str:
        """Submit and return the job's number."""
        return self.command("sbatch", "--parsable", *arguments)

    def state(self, job: str) -> str:
        found = re.search(r"JobState=(\w+)", self.command("scontrol", "show", "job", job))
        return found[1] if found else ""

    def command(self, *words: object) -> str:
        done = subprocess.run(list(map(str, words)), cwd=ROOT, env=self.environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout.strip()

    def task(self, rank: int) -> psutil.Process:
        """The Python process of one task of the step that runs now."""
        found = [
            process
            for process in self.processes()
            if process.environ().get("SLURM_PROCID") == str(rank) and "closeranks" in process.cmdline()
        ]
        assert len(found) == 1, found
        return found[0]

    def processes(self) -> list[psutil.Process]:
        """Everything that knows of this cluster's files: daemons, step daemons and tasks."""
        found = []
        for process in psutil.process_iter():
            try:
                words = [*process.cmdline(), *process.environ().values()]
            except (psutil.NoSuchProcess, psutil.ZombieProcess, psutil.AccessDenied):
                continue
            if process.pid != os.getpid() and any(str(self.folder) in word for word in words):
                found.append(process)
        return found

    def _write(self) -> None:
        ports = _free_ports(1 + len(NODES))
        host = socket.gethostname().split(".")[0]
        nodes = [_NODE_CONF.format(name=name, host=host, port=ports.pop()) for name in NODES]
        conf = _SLURM_CONF.format(
            host=host, folder=self.folder, port=ports.pop(), nodes="\n".join(nodes), names=",".join(NODES)
        )
        (self.folder / "state").mkdir()
        (self.folder / "slurm.conf").write_text(conf)
        unified = Path("/sys/fs/cgroup/cgroup.controllers").exists()
        (self.folder / "cgroup.conf").write_text(_CGROUP_CONF.format(plugin="cgroup/v2" if unified else "cgroup/v1"))
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)

    def _start(self, daemon: str, node: str = "") -> None:
        folder = self.folder
        arguments = {
            "munged": [
                "--foreground",
                "--force",  # the folder belongs to root, who starts it, not to a user of munge's own
                f"--key-file={folder}/munge.key",
                f"--socket={folder}/munge.socket",
                f"--pid-file={folder}/munged.pid",
                f"--log-file={folder}/munged.log",
                f"--seed-file={folder}/munge.seed",
            ],
            "slurmctld": ["-c", "-D", "-f", f"{folder}/slurm.conf"],
            "slurmd": ["-D", "-N", node, "-f", f"{folder}/slurm.conf"],
        }[daemon]
        with (folder / f"{daemon}{node}.out").open("wb") as out:
            self._daemons.append(
                subprocess.Popen(
                    ["setpriv", "--pdeathsig", "TERM", _program(daemon) or daemon, *arguments],
                    stdout=out,
                    stderr=out,
                    env=self.environment,
                    start_new_session=True,
                )
            )

    def _ask(self, *words: str) -> str | None:
        """What a client command says, None while the controller does not answer."""
        done = subprocess.run(words, env=self.environment, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else None

    def _last_words(self) -> str:
        return "\n".join(f"{path.name}: {path.read_text()[-1500:]}" for path in sorted(self.folder.glob("*.log")))


def wait_for(condition: Callable[[], bool], account: Callable[[], str], patience_s: float = _PATIENCE_S) -> None:
    """Ask until it is so; what ``account`` tells is the failure if it never is."""
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, account()
        time.sleep(0.1)


def read_until(process: subprocess.Popen[str], text: str) -> str:
    """What a command printed up to and with the line that holds ``text``."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if text in line:
            return "".join(lines)
    raise AssertionError(f"it ended before it said {text!r}: {''.join(lines)}")


def end(process: subprocess.Popen[str]) -> None:
    """For a test that failed half-way: srun ends its step at a second interrupt."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=300)


def _free_ports(number: int) -> list[int]:
    """Ports that were free together a moment ago."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports
