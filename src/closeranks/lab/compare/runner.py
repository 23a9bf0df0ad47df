"""Carries out the runs of a comparison, one after the other.

Each run is a real ``closeranks train`` with a folder of its own; ``done.json`` beside it records that it ended, and
how. Invariants: a run that has ended is not run again, unless its bytes were not counted and now can be; an interrupted
run leaves no record; a run that fails does not end the comparison; interrupting a comparison stops everything that it
started. Imports no torch.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO

import typer

from closeranks.agent.host.signals import is_sighup_ignored
from closeranks.core.errors import Disconnected, Drained, Interrupted, SetupError
from closeranks.core.system.linux import die_with_parent
from closeranks.lab.compare.comparison_plan import ComparisonPlan, ComparisonRun
from closeranks.lab.compare.config import NetworkConfig
from closeranks.lab.compare.namespaces import NamespaceHost, NamespaceHosts, address_of, children_of
from closeranks.lab.compare.run_environment import RunEnvironment
from closeranks.lab.compare.run_records import (
    ComparisonRunFolder,
    MachineInfo,
    RunRecord,
    disk_errors_explained,
    last_output,
    mixed_machines,
)
from closeranks.telemetry.run_log.recorder import parse_line
from closeranks.telemetry.run_log.run_folder import RunFolder

_LOOK_S = 0.05
_STOP_S = 15.0
_JOINED_STOP_S = 2.0
"""A host that joined has nothing to save once its leader is gone."""
_PORT = 29400
_MOST_SAMPLES = 4000


def run_all(
    plan: ComparisonPlan, place: RunEnvironment, on_done: Callable[[ComparisonRun, ComparisonRunFolder, RunRecord], str]
) -> None:
    """Run what is not finished, and print the outcome of each run as it ends; ``on_done`` returns it as text."""
    here = MachineInfo.here()
    if mixed := mixed_machines([_finished(ComparisonRunFolder(plan, run), place) for run in plan.runs], here):
        typer.echo(mixed)
    with _stopped_in_order():
        for number, run in enumerate(plan.runs, 1):
            slot = ComparisonRunFolder(plan, run)
            typer.echo(f"[{number}/{len(plan.runs)}] {run.case.name}, seed {run.seed}: ", nl=False)
            record = _finished(slot, place)
            before = " (from before)" if record is not None else ""
            if record is None:
                slot.clear()
                record = replace(_carry_out(plan, place, run, slot), machine=here)
                slot.write(record)
            typer.echo(on_done(run, slot, record) + before)


def _finished(slot: ComparisonRunFolder, place: RunEnvironment) -> RunRecord | None:
    """The record of an earlier run; None if there is none, or if its bytes were not counted but can be now."""
    record = slot.read()
    return record if record is None or record.traffic or not place.is_counted else None


@contextmanager
def _stopped_in_order() -> Iterator[None]:
    """SIGTERM and SIGHUP raise an exception as Ctrl-C does, so that all three clean up on the way out."""

    class _Terminated(BaseException): ...

    def stop(signum: int, frame: object) -> None:
        raise _Terminated(signum)

    heard = [number for number in (signal.SIGTERM, signal.SIGHUP) if not is_sighup_ignored(number)]
    before = {number: signal.signal(number, stop) for number in heard}
    again = "Everything is stopped; the same command continues with the missing runs."
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("stopped")
        raise Interrupted("interrupted", again) from None
    except _Terminated as told:
        typer.echo("stopped")
        if told.args == (signal.SIGHUP,):
            raise Disconnected("disconnected", again) from None
        raise Drained("terminated", again) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _carry_out(plan: ComparisonPlan, place: RunEnvironment, run: ComparisonRun, slot: ComparisonRunFolder) -> RunRecord:
    try:
        return _started_and_watched(plan, place, run, slot)
    except OSError as error:
        fix = "Fix that; the same command continues with the missing runs."
        raise SetupError(f"a run cannot be carried out: {error}", fix) from error


def _started_and_watched(
    plan: ComparisonPlan, place: RunEnvironment, run: ComparisonRun, slot: ComparisonRunFolder
) -> RunRecord:
    processes: list[subprocess.Popen[str]] = []
    with ExitStack() as stack:
        output = stack.enter_context(slot.open(slot.output.name))
        hosts = stack.enter_context(NamespaceHosts(place.network)) if place.is_counted else None
        stack.callback(_stop, processes, hosts is not None)
        command = _command(plan, run, slot, place.network)
        started_at = time.monotonic()
        processes.append(hosts.hosts[0].start(command, output) if hosts else _start_here(command, output))
        others = hosts.hosts[1:] if hosts else []
        for host in others:
            joined = stack.enter_context(slot.open(f"{host.name}.txt"))
            processes.append(host.start(_joining(slot, host, run.case.num_workers // (len(others) + 1)), joined))
        watched = _Watch(processes[0], hosts, slot, plan.compare.budget.seconds)
        exit_code = watched.wait()
    return RunRecord(
        exit_code=exit_code,
        wall_s=time.monotonic() - started_at,
        is_stopped=watched.is_stopped,
        traffic=tuple(watched.samples),
        said=last_output(slot.output.read_text(errors="replace")),
    )


def _start_here(command: Sequence[str], output: IO[str]) -> subprocess.Popen[str]:
    """In a session of its own, which Ctrl-C at the terminal does not reach: we pass it on."""
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=partial(die_with_parent, os.getpid()),
    )


def _command(
    plan: ComparisonPlan, run: ComparisonRun, slot: ComparisonRunFolder, network: NetworkConfig | None
) -> list[str]:
    num_hosts = network.hosts if network else 1
    words = [*_closeranks(), "train", str(plan.job_file), "-n", str(run.case.num_workers // num_hosts)]
    if network is not None:
        token = slot.path / "token"
        with disk_errors_explained(token):
            token.touch(mode=0o600)
            token.write_text(secrets.token_hex(32))
        listen = f"{address_of(0)}:{_PORT}"
        words += ["--hosts", str(num_hosts), "--listen", listen, "--token-file", str(token)]
    return [*words, *run.case.overrides, f"run.seed={run.seed}", f"run.folder={slot.folder}"]


def _closeranks() -> list[str]:
    """Unsets GLOO_SOCKET_IFNAME: the interface that it names does not exist in a namespace."""
    return ["env", "-u", "GLOO_SOCKET_IFNAME", sys.executable, "-m", "closeranks"]


def _joining(slot: ComparisonRunFolder, host: NamespaceHost, num_workers: int) -> list[str]:
    words = ["agent", "--join", f"{address_of(0)}:{_PORT}", "-n", str(num_workers), "--name", host.name]
    return [*_closeranks(), *words, "--token-file", str(slot.path / "token")]


def _stop(processes: Sequence[subprocess.Popen[str]], is_inside: bool) -> None:
    """Interrupt each process as Ctrl-C does, the leader first, and kill it if it does not end in time.

    What still runs in a PID namespace ends with its init.
    """
    patience_s = _STOP_S
    for process in processes:
        if process.poll() is None:
            _signal(process, is_inside, signal.SIGINT)
            try:
                process.wait(timeout=patience_s)
            except subprocess.TimeoutExpired:
                process.kill()
        process.wait()
        patience_s = _JOINED_STOP_S


def _signal(process: subprocess.Popen[str], is_inside: bool, signum: int) -> None:
    """Send a signal, in a namespace to the child of nsenter, which does not forward it. An ended process is ignored."""
    for pid in children_of(process.pid) if is_inside else [process.pid]:
        with suppress(ProcessLookupError):
            os.kill(pid, signum)


class _Watch:
    """Watches a run until it ends: counts its bytes, and stops it when its time is up."""

    def __init__(
        self,
        lead: subprocess.Popen[str],
        hosts: NamespaceHosts | None,
        slot: ComparisonRunFolder,
        budget_s: float | None,
    ) -> None:
        self._lead = lead
        self._hosts = hosts
        self._metrics = RunFolder(slot.folder).metrics(0)
        self._budget_s = budget_s
        self._began_at: float | None = None
        self.is_stopped = False
        self.samples: list[tuple[float, int]] = []
        self._look_s = _LOOK_S

    def wait(self) -> int:
        while True:
            try:
                status = self._lead.wait(timeout=self._look_s)
            except subprocess.TimeoutExpired:
                self._look()
            else:
                self._count()
                return status if status >= 0 else 128 - status

    def _look(self) -> None:
        self._count()
        if self._budget_s is None or self.is_stopped:
            return
        if self._began_at is None:
            self._began_at = _began_at(self._metrics)
        elif time.time() - self._began_at >= self._budget_s:
            self.is_stopped = True
            _signal(self._lead, self._hosts is not None, signal.SIGINT)

    def _count(self) -> None:
        if self._hosts is None:
            return
        self.samples.append((time.time(), self._hosts.sent_bytes()))
        if len(self.samples) > _MOST_SAMPLES:  # a long run: half as many samples suffice
            self.samples = self.samples[::2]
            self._look_s *= 2


def _began_at(metrics: Path) -> float | None:
    """When training began: the time of its first line."""
    try:
        with metrics.open("rb") as lines:
            fields = parse_line(lines.readline())
    except OSError:
        return None
    return float(fields["at"]) if fields else None
