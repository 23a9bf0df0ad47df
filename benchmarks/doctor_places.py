"""Where ``benchmarks/doctor.py`` runs a job: here, within limits, beside other programs, or on hosts with a slow link.

Limits are the kernel's, and hosts are network namespaces. Invariant: control groups, processes and hosts that were made
for a run are gone when it has ended, however it ended.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from closeranks.elastic.faults.cgroups import CPU, CgroupControl, CgroupUnavailable, ControlGroup, find_cgroup_parent
from closeranks.lab.compare.config import NetworkConfig
from closeranks.lab.compare.namespaces import NamespaceHosts, address_of, unavailable_reason

ROOT = Path(__file__).parents[1]
_TIMEOUT_S = 240.0
_END_S = 30.0
_PORT = 29400
_READS = CgroupControl("blkio", "blkio", "blkio.throttle.read_bps_device", "io.max")


class PlaceUnavailable(Exception):
    """This machine does not allow it; the message says why."""


@dataclass(frozen=True, slots=True)
class TrainCommand:
    job: str
    overrides: Sequence[str]
    folder: Path
    num_workers: int
    faults: str = ""

    def arguments(self, num_workers: int, *options: str) -> list[str]:
        """``num_workers``: on the host where it is run."""
        faults = ["--faults", self.faults] if self.faults else []
        command = ["train", str(ROOT / self.job), "-n", str(num_workers), *options, *faults]
        return [*_closeranks(), *command, *self.overrides, f"run.folder={self.folder}"]


Place = Callable[[TrainCommand], str]
"""Runs it to its end, and returns what it printed."""


def here(command: TrainCommand) -> str:
    return _run(command)


def limited_cpus(cpus: float) -> Place:
    """All its processes together may use so many processors."""

    def run(command: TrainCommand) -> str:
        with _control_group(CPU) as (group, _):
            group.limit_cpu(cpus)
            return _run(command, group)

    return run


def slow_disk(bytes_per_s: int) -> Place:
    """The disk of the run folder gives it so many bytes a second, unless the page cache has them. Saves are slow there
    too: what was written is read back from the disk."""

    def run(command: TrainCommand) -> str:
        disk = _disk_of(command.folder.parent)
        with _control_group(_READS) as (group, version):
            limit = f"{disk} rbps={bytes_per_s}" if version == 2 else f"{disk} {bytes_per_s}"
            group.write(_READS.file_v2 if version == 2 else _READS.file_v1, limit)
            return _run(command, group)

    return run


def beside_others(num: int) -> Place:
    """So many programs compute beside it."""

    def run(command: TrainCommand) -> str:
        others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(num)]
        try:
            return _run(command)
        finally:
            for other in others:
                other.kill()
                other.wait()

    return run


def traced(command: TrainCommand) -> str:
    """While it trains, ``closeranks profile`` traces a few steps."""
    output = command.folder.with_suffix(".txt")
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("w") as printed:
        training = subprocess.Popen(command.arguments(command.num_workers), stdout=printed, stderr=subprocess.STDOUT)
        metrics = command.folder / "metrics" / "rank-00000.jsonl"
        while training.poll() is None and not (metrics.exists() and b'"step"' in metrics.read_bytes()):
            time.sleep(0.1)
        subprocess.run([*_closeranks(), "profile", str(command.folder)], timeout=_TIMEOUT_S, check=False)
        training.wait(_TIMEOUT_S)
    return output.read_text(errors="replace")


def two_hosts(mbit: float) -> Place:
    """Half of its workers on each; the link between them carries ``mbit`` in each direction."""
    return on_hosts(2, mbit)


def one_slow_link(num: int, mbit: float, slow_mbit: float) -> Place:
    """As many hosts with a share of its workers each; what the last one sends is slower."""
    return on_hosts(num, mbit, slow_mbit)


def on_hosts(num_hosts: int, mbit: float, last_mbit: float | None = None) -> Place:

    def run(command: TrainCommand) -> str:
        if reason := unavailable_reason(shaped=True):
            raise PlaceUnavailable(reason)
        command.folder.parent.mkdir(parents=True, exist_ok=True)
        token, output = (command.folder.with_suffix(suffix) for suffix in (".token", ".txt"))
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        with NamespaceHosts(NetworkConfig(hosts=num_hosts, mbit=mbit)) as hosts, output.open("w") as printed:
            lead, *others = hosts.hosts
            if last_mbit is not None:
                _slow_down(others[-1].init_pid, last_mbit)
            num, where = command.num_workers // num_hosts, f"{address_of(0)}:{_PORT}"
            options = ("--hosts", str(num_hosts), "--listen", where, "--token-file", str(token))
            running = lead.start(command.arguments(num, *options), printed)
            for other in others:
                agent = ["agent", "--join", where, "-n", str(num), "--name", other.name, "--token-file", str(token)]
                other.start([*_closeranks(), *agent], printed)
            running.wait(_TIMEOUT_S)
        return output.read_text(errors="replace")

    return run


def _slow_down(init_pid: int, mbit: float) -> None:
    """What a host sends."""
    shape = f"qdisc replace dev eth0 root tbf rate {mbit:g}mbit burst 64kb latency 50ms"
    subprocess.run(["nsenter", "--target", str(init_pid), "--net", "tc", *shape.split()], check=True)


def _run(command: TrainCommand, group: ControlGroup | None = None) -> str:
    done = subprocess.run(
        command.arguments(command.num_workers),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
        stdin=subprocess.DEVNULL,
        preexec_fn=(lambda: group.add(os.getpid())) if group else None,
    )
    return done.stdout


def _closeranks() -> list[str]:
    """The interface that GLOO_SOCKET_IFNAME names may not exist on a host of ours."""
    path = os.pathsep.join([str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")])
    environment = ["-u", "GLOO_SOCKET_IFNAME", f"PYTHONPATH={path}", "OMP_NUM_THREADS=1"]
    return ["env", *environment, sys.executable, "-m", "closeranks"]


@contextmanager
def _control_group(need: CgroupControl) -> Iterator[tuple[ControlGroup, int]]:
    """The group, and the version of its hierarchy."""
    try:
        parent = find_cgroup_parent(need)
    except CgroupUnavailable as error:
        raise PlaceUnavailable(str(error)) from error
    group = ControlGroup(parent)
    try:
        yield group, parent.version
    finally:
        group.remove(_END_S)


def _disk_of(folder: Path) -> str:
    """``MAJOR:MINOR`` of the whole disk: limits apply to no partition."""
    folder.mkdir(parents=True, exist_ok=True)
    device = os.stat(folder).st_dev
    path = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    if not path.exists():
        raise PlaceUnavailable(f"{folder} is on no disk of its own (tmpfs, overlay)")
    disk = path.resolve()
    return ((disk.parent if (disk / "partition").exists() else disk) / "dev").read_text().strip()
