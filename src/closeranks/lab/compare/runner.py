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
from collections.abc import Callable, Iterator, Mapping, Sequence
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

_POLL_S = 0.05
_STOP_S = 15.0
_JOINED_STOP_S = 2.0
"""A host that joined has nothing to save once its leader is gone."""
_PORT = 29400
_MAX_SAMPLES = 4000


def run_all(
    plan: ComparisonPlan,
    environments: Mapping[str, RunEnvironment],
    on_done: Callable[[ComparisonRun, ComparisonRunFolder, RunRecord], str],
) -> None:
    """Run what is not finished, and print the outcome of each run as it ends; ``on_done`` returns it as text.

    ``environments``: by the name of the condition.
    """
    here = MachineInfo.here()
    found = [_finished(ComparisonRunFolder(plan, run), environments[run.case.condition.name]) for run in plan.runs]
    if mixed := mixed_machines(found, here):
        typer.echo(mixed)
    with _signals_as_exceptions():
        for number, run in enumerate(plan.runs, 1):
            run_folder, environment = ComparisonRunFolder(plan, run), environments[run.case.condition.name]
            typer.echo(f"[{number}/{len(plan.runs)}] {run.case.label}, seed {run.seed}: ", nl=False)
            record = _finished(run_folder, environment)
            before = " (from before)" if record is not None else ""
            if record is None:
                run_folder.clear()
                record = replace(_run_one(plan, environment, run, run_folder), machine=here)
                run_folder.write(record)
            typer.echo(on_done(run, run_folder, record) + before)


def _finished(run_folder: ComparisonRunFolder, environment: RunEnvironment) -> RunRecord | None:
    """The record of an earlier run; None if there is none, or if its bytes were not counted but can be now."""
    record = run_folder.read()
    return record if record is None or record.traffic or not environment.is_counted else None


@contextmanager
def _signals_as_exceptions() -> Iterator[None]:
    """SIGTERM and SIGHUP raise an exception as Ctrl-C does, so that all three clean up on the way out."""

    class _Terminated(BaseException): ...

    def stop(signum: int, frame: object) -> None:
        raise _Terminated(signum)

    signals = [number for number in (signal.SIGTERM, signal.SIGHUP) if not is_sighup_ignored(number)]
    handlers = {number: signal.signal(number, stop) for number in signals}
    again = "Everything is stopped; the same command continues with the missing runs."
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("stopped")
        raise Interrupted("interrupted", again) from None
    except _Terminated as error:
        typer.echo("stopped")
        if error.args == (signal.SIGHUP,):
            raise Disconnected("disconnected", again) from None
        raise Drained("terminated", again) from None
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _run_one(
    plan: ComparisonPlan, environment: RunEnvironment, run: ComparisonRun, run_folder: ComparisonRunFolder
) -> RunRecord:
    try:
        return _start_and_watch(plan, environment, run, run_folder)
    except OSError as error:
        fix = "Fix that; the same command continues with the missing runs."
        raise SetupError(f"a run cannot be carried out: {error}", fix) from error


def _start_and_watch(
    plan: ComparisonPlan, environment: RunEnvironment, run: ComparisonRun, run_folder: ComparisonRunFolder
) -> RunRecord:
    processes: list[subprocess.Popen[str]] = []
    with ExitStack() as stack:
        output = stack.enter_context(run_folder.open(run_folder.output.name))
        hosts = stack.enter_context(NamespaceHosts(environment.network)) if environment.is_counted else None
        stack.callback(_stop, processes, hosts is not None)
        command = _command(plan, run, run_folder, environment.network)
        started_at = time.monotonic()
        processes.append(hosts.hosts[0].start(command, output) if hosts else _start_here(command, output))
        others = hosts.hosts[1:] if hosts else []
        for host in others:
            host_output = stack.enter_context(run_folder.open(f"{host.name}.txt"))
            processes.append(
                host.start(_agent_command(run_folder, host, run.case.num_workers // (len(others) + 1)), host_output)
            )
        watch = _Watch(processes[0], hosts, run_folder, plan.compare.budget.seconds)
        exit_code = watch.wait()
    return RunRecord(
        exit_code=exit_code,
        wall_s=time.monotonic() - started_at,
        is_stopped=watch.is_stopped,
        traffic=tuple(watch.samples),
        said=last_output(run_folder.output.read_text(errors="replace")),
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
    plan: ComparisonPlan, run: ComparisonRun, run_folder: ComparisonRunFolder, network: NetworkConfig | None
) -> list[str]:
    num_hosts = network.hosts if network else 1
    command = [*_closeranks(), "train", str(plan.job_file), "-n", str(run.case.num_workers // num_hosts)]
    if network is not None:
        token = run_folder.path / "token"
        with disk_errors_explained(token):
            token.touch(mode=0o600)
            token.write_text(secrets.token_hex(32))
        listen = f"{address_of(0)}:{_PORT}"
        command += ["--hosts", str(num_hosts), "--listen", listen, "--token-file", str(token)]
    if faults := run.case.faults.faults:
        command += ["--faults", ", ".join(map(str, faults))]
    return [*command, *run.case.overrides, f"run.seed={run.seed}", f"run.folder={run_folder.folder}"]


def _closeranks() -> list[str]:
    """Unsets GLOO_SOCKET_IFNAME: the interface that it names does not exist in a namespace."""
    return ["env", "-u", "GLOO_SOCKET_IFNAME", sys.executable, "-m", "closeranks"]


def _agent_command(run_folder: ComparisonRunFolder, host: NamespaceHost, num_workers: int) -> list[str]:
    arguments = ["agent", "--join", f"{address_of(0)}:{_PORT}", "-n", str(num_workers), "--name", host.name]
    return [*_closeranks(), *arguments, "--token-file", str(run_folder.path / "token")]


def _stop(processes: Sequence[subprocess.Popen[str]], is_inside: bool) -> None:
    """Interrupt each process as Ctrl-C does, the leader first, and kill it if it does not end in time.

    What still runs in a PID namespace ends with its init.
    """
    timeout_s = _STOP_S
    for process in processes:
        if process.poll() is None:
            _signal(process, is_inside, signal.SIGINT)
            try:
                process.wait(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
        process.wait()
        timeout_s = _JOINED_STOP_S


def _signal(process: subprocess.Popen[str], is_inside: bool, signum: int) -> None:
    """Send a signal, in a namespace to the child of nsenter, which does not forward it. An ended process is ignored."""
    for pid in children_of(process.pid) if is_inside else [process.pid]:
        with suppress(ProcessLookupError):
            os.kill(pid, signum)


class _Watch:
    """Watches a run until it ends: counts its bytes, and stops it when its time is up."""

    def __init__(
        self,
        leader: subprocess.Popen[str],
        hosts: NamespaceHosts | None,
        run_folder: ComparisonRunFolder,
        budget_s: float | None,
    ) -> None:
        self._leader = leader
        self._hosts = hosts
        self._metrics = RunFolder(run_folder.folder).metrics(0)
        self._budget_s = budget_s
        self._began_at: float | None = None
        self.is_stopped = False
        self.samples: list[tuple[float, int]] = []
        self._poll_s = _POLL_S

    def wait(self) -> int:
        while True:
            try:
                status = self._leader.wait(timeout=self._poll_s)
            except subprocess.TimeoutExpired:
                self._poll()
            else:
                self._count()
                return status if status >= 0 else 128 - status

    def _poll(self) -> None:
        self._count()
        if self._budget_s is None or self.is_stopped:
            return
        if self._began_at is None:
            self._began_at = _began_at(self._metrics)
        elif time.time() - self._began_at >= self._budget_s:
            self.is_stopped = True
            _signal(self._leader, self._hosts is not None, signal.SIGINT)

    def _count(self) -> None:
        if self._hosts is None:
            return
        self.samples.append((time.time(), self._hosts.sent_bytes()))
        if len(self.samples) > _MAX_SAMPLES:  # a long run: half as many samples suffice
            self.samples = self.samples[::2]
            self._poll_s *= 2


def _began_at(metrics: Path) -> float | None:
    """When training began: the time of its first line."""
    try:
        with metrics.open("rb") as lines:
            fields = parse_line(lines.readline())
    except OSError:
        return None
    return float(fields["at"]) if fields else None
