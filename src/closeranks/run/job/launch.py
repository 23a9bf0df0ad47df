"""Starts workers for the commands ``train`` and ``run`` and displays their progress.

Imports no torch: the agent runs in this process and must stay small. Invariant: a run that started always ends with its
report written and its terminal restored, whatever ended it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from closeranks.agent.agent import Agent
from closeranks.agent.config import AgentConfig
from closeranks.agent.job.job_controller import OnTick
from closeranks.agent.job_view import JobView
from closeranks.agent.launch_plan import JobOutcome, LaunchPlan, RecoverySettings, ResizedLaunch
from closeranks.agent.transport.host_connections import JoinEndpoint
from closeranks.agent.transport.token import leader_token
from closeranks.core.errors import ENDINGS, CloseranksError, ConfigError, Problem, SetupError, UserError
from closeranks.core.events import Event, Launched, LaunchEnded, RunStarted, Saved, Warned, decode
from closeranks.core.registry import is_import_path
from closeranks.core.system.address import parse_listen
from closeranks.core.system.environment import child_environment, detect_world, job_token, num_gpus, thread_limit
from closeranks.core.system.network_interfaces import WILDCARDS, own_address
from closeranks.core.system.process_age import process_age_s
from closeranks.core.system.process_title import set_title
from closeranks.core.tracebacks import display_path
from closeranks.core.world import World
from closeranks.facts.prices import PriceTable, load_prices
from closeranks.run.job.batch_history import BatchHistory
from closeranks.run.job.job import Job, check_workers, layout_for, load_job
from closeranks.run.job.ownership import OwnedRunFolder, check_owned, owned_run_folder
from closeranks.run.job.paths import resolve_existing_paths
from closeranks.run.job.resize import describe_samples, fault_limits, resize_job
from closeranks.run.job.run_folder import make_free_folder, prepare_folder, remove_refused_folder, unwritable_error
from closeranks.run.job.status_updates import StatusUpdater
from closeranks.run.worker.error_output import print_error, report_turn
from closeranks.telemetry.goodput.loss_target import tell_target
from closeranks.telemetry.live.progress import ProgressDisplay
from closeranks.telemetry.run_log.recorder import AGENT, EventRecorder

_STARTED_ELSEWHERE = ("torchrun", "slurm")
_WARM = "closeranks.run.worker.warmup:warm_up"


@dataclass(frozen=True, slots=True)
class JobHosts:
    """The hosts of a job, as the command line names them."""

    num_hosts: int = 1
    """The job starts when this many have joined, including this one,"""
    max_hosts: int = 1
    """and grows up to this many; others are standby hosts."""
    listen: str = ""
    """Address of this host at which others may join, with or without a port."""
    token_file: Path | None = None

    @property
    def accepts_hosts(self) -> bool:
        return bool(self.listen) or self.max_hosts > 1


def train(
    path: Path,
    overrides: Sequence[str],
    num_workers: int,
    on_tick: OnTick | None = None,
    hosts: JobHosts | None = None,
) -> None:
    """``on_tick`` observes the job while it runs, see ``agent.job.job_controller``."""
    hosts = hosts or JobHosts()
    world = detect_world()
    if world.launcher in _STARTED_ELSEWHERE:
        _train_here(path, overrides, num_workers, world)
        return
    job = resolve_existing_paths(load_job(path, overrides).value, path)
    add_job_folder_to_path(path)
    num_workers = num_workers_for(job, num_workers)
    with owned_run_folder(job, path.stem) as owned:
        history = _batch_history(job, owned.folder)
        job = history.apply_to(job)
        if problems := check_workers(job, num_workers * hosts.max_hosts):
            raise ConfigError(problems)
        prepare_folder(job, owned.folder)
        launch = _training_launch(job, owned, history, hosts, (str(path), tuple(overrides)))
        _start(replace(launch, on_tick=_with_ownership_check(on_tick)), num_workers)


def _training_launch(
    job: Job, owned: OwnedRunFolder, history: BatchHistory, hosts: JobHosts, command: tuple[str, tuple[str, ...]]
) -> _Launch:
    return _Launch(
        entry="closeranks.run.worker.entry:train_entry",
        payload=_payload(job, owned.folder, history),
        folder=owned.folder,
        is_new=owned.is_new,
        preload=user_modules(job),
        agent=_reachable(job.agent, hosts),
        threads=job.run.threads,
        log_every=job.telemetry.log_every,
        prices=load_prices(job.telemetry.prices),
        report=job.telemetry.report,
        command=command,
        hosts=hosts,
        recovery=_recovery_settings(job, owned.folder, history) if job.elastic.enabled else None,
        saves=job.checkpoint.save,
    )


def _with_ownership_check(on_tick: OnTick | None) -> OnTick:
    """Checks at the start of every tick that the run still owns what it writes to."""

    def tick(view: JobView) -> float | None:
        check_owned()
        return on_tick(view) if on_tick is not None else None

    return tick


def _reachable(config: AgentConfig, hosts: JobHosts) -> AgentConfig:
    """If other hosts may join, their workers must be able to reach this host's workers."""
    if not hosts.accepts_hosts or config.host != AgentConfig().host:
        return config
    host = listen_address(hosts)[0]
    return config.model_copy(update={"host": own_address() if host in WILDCARDS else host})


def listen_address(hosts: JobHosts) -> tuple[str, int]:
    """Address and port; 0: any free port. Loopback, unless an address is given."""
    if not hosts.listen:
        return AgentConfig().host, 0
    return parse_listen(hosts.listen)


def num_workers_for(job: Job, wanted: int) -> int:
    """As many as were asked for; 0: one for each GPU, or as many as the layout names."""
    return wanted or num_gpus() or layout_for(job, 1).num_ranks


def _batch_history(job: Job, folder: Path) -> BatchHistory:
    if not job.checkpoint.resume:
        return BatchHistory()
    from closeranks.run.job.batch_history_lookup import (
        find_batch_history,  # numpy and the readers of checkpoints: only where they are needed
    )

    return find_batch_history(job, folder)


def _recovery_settings(job: Job, folder: Path, history: BatchHistory) -> RecoverySettings:
    def resize(num_workers: int, num_wanted: int) -> ResizedLaunch | None:
        found = resize_job(job, num_workers, num_wanted)
        if found is None:
            return None
        return ResizedLaunch(found.num_workers, _payload(found.job, folder, history), found.summary)

    return RecoverySettings(
        fault_limits(job.elastic), resize, lambda step: describe_samples(job, step, history.ends), warm_up=_WARM
    )


def _payload(job: Job, folder: Path, history: BatchHistory) -> dict[str, Any]:
    return {"job": job.model_dump(mode="json"), "folder": str(folder), "past": history.to_json()}


def _train_here(path: Path, overrides: Sequence[str], num_workers: int, world: World) -> None:
    """Train as one of the ranks that torchrun or srun has started; an error in the job is printed by one of them."""
    try:
        if num_workers not in (0, world.size):
            what = f"{num_workers} were asked for, but {world.launcher} has started {world.size} workers"
            raise ConfigError([Problem("-n", what, "Leave it out.")])
        job = resolve_existing_paths(load_job(path, overrides).value, path)
        # A resumed job may have a micro-batch size that it does not name: the session looks it up and checks.
        if not job.checkpoint.resume and (problems := check_workers(job, world.size)):
            raise ConfigError(problems)
    except UserError as error:
        print_error(error, report_turn(error, world, None))
        sys.exit(error.exit_code)
    add_job_folder_to_path(path)
    from closeranks.run.worker.entry import train_in_process

    train_in_process(job, str(path), overrides)


def add_job_folder_to_path(path: Path) -> None:
    """A job's own modules are imported from the folder of its file, else from the working folder."""
    sys.path[:0] = [str(path.resolve().parent), os.getcwd()]


def run_script(script: Path, arguments: Sequence[str], num_workers: int) -> None:
    if not script.is_file():
        raise UserError(f"there is no script at {script}", "Name a Python file; its own flags come after it.")
    if detect_world().launcher in _STARTED_ELSEWHERE:
        raise SetupError("`closeranks run` starts its own workers", f"Under torchrun or srun, start {script} itself.")
    folder = _script_log_folder(script)
    launch = _Launch(
        entry="closeranks.run.worker.entry:script_entry",
        payload={"script": str(script), "args": list(arguments), "folder": str(folder)},
        folder=folder,
        must_finish=False,
    )
    _start(launch, num_workers or num_gpus() or 1)


def _script_log_folder(script: Path) -> Path:
    """The folder of the logs until a session of the script names its own; they stay there if none does."""
    wanted = Path("runs") / script.stem
    try:
        return make_free_folder(wanted)
    except OSError as error:
        raise unwritable_error(wanted, error) from error


@dataclass(frozen=True, slots=True)
class _Launch:
    """What to launch: the workers' entry point and payload, the run folder and the settings."""

    entry: str
    payload: dict[str, Any]
    folder: Path
    is_new: bool = True
    """Whether the folder was made for this run."""
    preload: tuple[str, ...] = ()
    agent: AgentConfig = field(default_factory=AgentConfig)
    threads: int = 0
    log_every: int = 10
    prices: PriceTable | None = None
    report: bool = True
    command: tuple[str, tuple[str, ...]] = ("", ())
    must_finish: bool = True
    recovery: RecoverySettings | None = None
    saves: bool = False
    """Whether the job saves its state."""
    on_tick: OnTick | None = None
    hosts: JobHosts = field(default_factory=JobHosts)


def _start(launch: _Launch, num_workers: int) -> None:
    plan = make_launch_plan(
        launch.entry,
        launch.payload,
        launch.folder,
        launch.preload,
        launch.agent,
        threads=launch.threads,
        num_workers=num_workers,
    )
    plan = replace(
        plan,
        recovery_settings=launch.recovery,
        is_elastic=launch.recovery is not None,
        rescues=launch.saves,
        threads=launch.threads,
        must_finish=launch.must_finish,
        num_hosts=launch.hosts.num_hosts,
        max_hosts=launch.hosts.max_hosts,
    )
    failure = ""
    set_title("agent", str(launch.folder))
    with ProgressDisplay(Console(), log_every=launch.log_every, prices=launch.prices) as progress:
        display = _Display(progress, launch.folder)
        try:
            plan = replace(plan, join_endpoint=_join_endpoint(launch, progress.print_line))
            outcome = display.watch(plan, launch.on_tick)
        except CloseranksError as error:
            failure = str(error)
            if isinstance(error, UserError) and launch.is_new and not display.has_begun:
                remove_refused_folder(launch.folder)
            raise
        finally:
            progress.close()
            if display.has_begun:
                tell_target(display.folder, progress.print_line)
                _write_report(launch, display.folder, failure)
    if outcome.reason != "finished":
        where = f". {outcome.rescued}" if outcome.rescued else f"; {_resume_hint(display.folder, display.saved)}"
        raise ENDINGS[outcome.reason](outcome.reason, f"Everything is stopped{where}")


def _join_endpoint(launch: _Launch, on_note: Callable[[str], None]) -> JoinEndpoint | None:
    hosts = launch.hosts
    if not hosts.accepts_hosts:
        return None
    default_file = (launch.folder / "job.token").absolute()
    token = leader_token(hosts.token_file, job_token(), default_file, on_note)
    host, port = listen_address(hosts)
    token_file = hosts.token_file or ("" if job_token() else default_file)
    return JoinEndpoint(host, port, token, address=launch.agent.host, token_file=str(token_file))


def parse_hosts(text: str) -> tuple[int, int]:
    """``2`` or ``1:4``: the number of hosts that a job starts with, and the number up to which it grows."""
    first, _, last = text.partition(":")
    if not (first.isdecimal() and (last or first).isdecimal() and 1 <= int(first) <= int(last or first)):
        raise ConfigError([Problem("--hosts", f"'{text}' is not a host count", "Write 2, or 1:4 to begin with 1.")])
    return int(first), int(last or first)


def make_launch_plan(
    entry: str,
    payload: dict[str, Any],
    folder: Path,
    preload: tuple[str, ...],
    agent: AgentConfig,
    *,
    threads: int,
    num_workers: int,
) -> LaunchPlan:
    """The launch plan for an agent of this host, for workers with any of our entry points."""
    return LaunchPlan(
        num_workers=num_workers,
        entry=entry,
        payload=payload,
        # The first optimizer step imports torch._dynamo: about a second in each worker, unless it is loaded already.
        preload=("closeranks.run.worker.entry", "torch._dynamo", *preload),
        sys_path=tuple(sys.path[:2]) if preload else (),
        environment=child_environment(_threads(threads, num_workers)),
        log_folder=folder / "logs",
        config=agent,
    )


class _Display:
    """Displays the events and output that the agent receives, and records them."""

    def __init__(self, progress: ProgressDisplay, folder: Path) -> None:
        self._progress = progress
        self.folder = folder
        """The run folder; a script's session may name another."""
        self.saved = ""
        """Path of the newest checkpoint that rank 0 has reported."""
        self.has_begun = False
        """Whether a run started, rather than being refused."""
        self._agent: Agent | None = None
        self._has_moved = self._has_noted_launch = False
        self._status = StatusUpdater(folder, progress.print_line)
        self._agent_log: EventRecorder | None = None

    def watch(self, plan: LaunchPlan, on_tick: OnTick | None) -> JobOutcome:
        agent = self._agent = Agent(
            plan,
            on_event=self._on_event,
            on_output=self._on_output,
            on_note=self._progress.print_line,
            on_tick=self._status.chained_with(on_tick),
        )
        ending = "failed"
        try:
            outcome = agent.run()
            ending = outcome.reason
            return outcome
        finally:
            if self._has_noted_launch:
                self._tell(LaunchEnded(ending))
            self._status.finish(ending)
            if self._agent_log is not None:
                self._agent_log.close()

    def _on_event(self, rank: int, fields: dict[str, Any]) -> None:
        event = decode(fields)
        if event is None or rank not in (0, AGENT):
            return
        if rank == 0:
            self.has_begun = True
            if isinstance(event, RunStarted):
                if event.folder:
                    self._move(Path(display_path(event.folder)))
                self._note_launch()
            elif isinstance(event, Saved):
                self.saved = event.path
        else:
            self._record(event)
        self._status.handle(event)
        self._progress.handle(event)

    def _note_launch(self) -> None:
        """Record once when this command was started: what its start-up costs is known to nobody else."""
        if not self._has_noted_launch:
            self._has_noted_launch = True
            self._tell(Launched(process_age_s()))

    def _tell(self, event: Event) -> None:
        self._record(event)
        self._status.handle(event)

    def _move(self, folder: Path) -> None:
        """A script's session has named its folder: everything written so far is moved there. A second session of the
        script has a folder of its own; the logs stay with the first."""
        first, self.folder = self.folder, folder
        self._status.set_folder(folder)
        if not self._has_moved and self._agent is not None and first.absolute() != folder.absolute():
            self._agent.move_logs(folder / "logs")
            if self._agent_log is not None:
                self._agent_log.close()
                self._agent_log = None
            remove_refused_folder(first)
        self._has_moved = True

    def _record(self, event: Event) -> None:
        """Record an event of the agent itself: workers that were killed cannot record it."""
        if self._agent_log is None:
            self._agent_log = EventRecorder(self.folder, AGENT, must_open=False)
            self._agent_log.add_sink(lambda event: self._progress.handle(event) if isinstance(event, Warned) else None)
        self._agent_log.emit(event)

    def _on_output(self, rank: int, text: str) -> None:
        self._progress.print_output(text.rstrip("\n"))


def _resume_hint(folder: Path, saved: str) -> str:
    """``saved``: path of the last checkpoint that was reported."""
    if saved and not Path(saved).is_relative_to(folder.absolute()):
        return f"continue with checkpoint.resume={saved}"
    if (folder / "checkpoints" / "latest").exists():
        return f"continue with checkpoint.resume={folder}"
    return f"the run folder is {folder}; it holds no checkpoint"


def _threads(wanted: int, num_workers: int) -> int:
    return wanted or thread_limit() or max(1, len(os.sched_getaffinity(0)) // num_workers)


def user_modules(job: Job) -> tuple[str, ...]:
    """Modules of the user's that the job names: imported once, before the workers are forked."""
    code = [getattr(job.model, "loss", ""), getattr(job.data, "collate", "")]
    names = [job.model.name, job.data.name, *code, *job.run.hooks]
    return tuple(dict.fromkeys(name.partition(":")[0] for name in names if is_import_path(name)))


def _write_report(launch: _Launch, folder: Path, failure: str) -> None:
    """Write the plot and the report from the run folder alone. A run that recorded nothing gets neither."""
    if not launch.report:
        return
    from closeranks.run.diagnosis import findings_section
    from closeranks.telemetry.reports.pages import write_pages

    job_file, overrides = launch.command
    write_pages(
        folder,
        Console(soft_wrap=True, highlight=False).print,
        job_file=job_file,
        overrides=overrides,
        failure=failure,
        is_script=not job_file,
        findings=findings_section,
    )
