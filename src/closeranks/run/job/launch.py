"""How does a verb start workers here and show what they do?

Shared by ``train`` and ``run``. Imports no torch: the agent lives in this process and must stay light. Invariant: a run
that began always ends with its report written and its terminal given back, whatever ended it.
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
from closeranks.agent.transport.address import parse_listen
from closeranks.agent.transport.host_connections import JoinEndpoint
from closeranks.agent.transport.token import lead_token
from closeranks.core.errors import ENDINGS, CloseranksError, ConfigError, Problem, SetupError, UserError
from closeranks.core.events import Event, RunStarted, Saved, Warned, decode
from closeranks.core.registry import is_import_path
from closeranks.core.system.environment import child_environment, detect_world, job_token, num_gpus, thread_limit
from closeranks.core.system.network_interfaces import WILDCARDS, own_address
from closeranks.core.system.process_title import set_title
from closeranks.core.tracebacks import display_path
from closeranks.core.world import World
from closeranks.run.job.batch_history import BatchHistory
from closeranks.run.job.job import Job, check_workers, layout_for, load_job
from closeranks.run.job.ownership import OwnedRunFolder, check_owned, owned_run_folder
from closeranks.run.job.paths import resolve_existing_paths
from closeranks.run.job.resize import describe_samples, fault_limits, resize_job
from closeranks.run.job.run_folder import make_free_folder, prepare_folder, remove_refused_folder, unwritable_error
from closeranks.run.job.status_updates import StatusUpdater
from closeranks.run.worker.error_output import print_error, report_turn
from closeranks.telemetry.live.progress import ProgressDisplay
from closeranks.telemetry.run_log.recorder import AGENT, EventRecorder

_STARTED_ELSEWHERE = ("torchrun", "slurm")
_WARM = "closeranks.run.worker.warmup:warm_up"


@dataclass(frozen=True, slots=True)
class JobHosts:
    """The hosts of a job, as the command line names them."""

    num_hosts: int = 1
    """It begins when so many are here, this one included,"""
    max_hosts: int = 1
    """and grows up to so many; others stand by."""
    listen: str = ""
    """Where others may join: an address of this host, with a port or without."""
    token_file: Path | None = None

    @property
    def accepts_hosts(self) -> bool:
        return bool(self.listen) or self.max_hosts > 1


def train(
    path: Path,
    overrides: Sequence[str],
    num_workers: int,
    on_turn: OnTick | None = None,
    party: JobHosts | None = None,
) -> None:
    """``on_turn`` looks on while the job runs: see ``agent.lead``."""
    party = party or JobHosts()
    world = detect_world()
    if world.launcher in _STARTED_ELSEWHERE:
        _train_here(path, overrides, num_workers, world)
        return
    job = resolve_existing_paths(load_job(path, overrides).value, path)
    add_job_folder_to_path(path)
    num_workers = workers_of(job, num_workers)
    with owned_run_folder(job, path.stem) as claim:
        past = _past_of(job, claim.folder)
        job = past.apply_to(job)
        if problems := check_workers(job, num_workers * party.max_hosts):
            raise ConfigError(problems)
        prepare_folder(job, claim.folder)
        work = _training(job, claim, past, party, (str(path), tuple(overrides)))
        _start(replace(work, on_turn=_minding(on_turn)), num_workers)


def _training(
    job: Job, claim: OwnedRunFolder, past: BatchHistory, party: JobHosts, command: tuple[str, tuple[str, ...]]
) -> _Work:
    return _Work(
        entry="closeranks.run.worker.entry:train_entry",
        payload=_payload(job, claim.folder, past),
        folder=claim.folder,
        is_new=claim.is_new,
        preload=modules_of(job),
        agent=_reachable(job.agent, party),
        threads=job.run.threads,
        log_every=job.telemetry.log_every,
        report=job.telemetry.report,
        command=command,
        party=party,
        survival=_survival(job, claim.folder, past) if job.elastic.enabled else None,
        saves=job.checkpoint.save,
    )


def _minding(on_turn: OnTick | None) -> OnTick:
    """Every turn begins with the question whether the run still owns what it writes to."""

    def look(view: JobView) -> float | None:
        check_owned()
        return on_turn(view) if on_turn is not None else None

    return look


def _reachable(config: AgentConfig, party: JobHosts) -> AgentConfig:
    """Where other hosts join, their workers must reach this host's too."""
    if not party.accepts_hosts or config.host != AgentConfig().host:
        return config
    host = listen_address(party)[0]
    return config.model_copy(update={"host": own_address() if host in WILDCARDS else host})


def listen_address(party: JobHosts) -> tuple[str, int]:
    """Address and port; 0: any free port. Beyond loopback somebody must say so."""
    if not party.listen:
        return AgentConfig().host, 0
    return parse_listen(party.listen)


def workers_of(job: Job, wanted: int) -> int:
    """As many as were asked for; 0: one for each GPU, or as many as the layout names."""
    return wanted or num_gpus() or layout_for(job, 1).num_ranks


def _past_of(job: Job, folder: Path) -> BatchHistory:
    if not job.checkpoint.resume:
        return BatchHistory()
    from closeranks.run.job.batch_history_lookup import (
        find_batch_history,  # numpy and the readers of checkpoints: only where they are needed
    )

    return find_batch_history(job, folder)


def _survival(job: Job, folder: Path, past: BatchHistory) -> RecoverySettings:
    def fit_to(num_workers: int, num_wanted: int) -> ResizedLaunch | None:
        found = resize_job(job, num_workers, num_wanted)
        if found is None:
            return None
        return ResizedLaunch(found.num_workers, _payload(found.job, folder, past), found.summary)

    return RecoverySettings(
        fault_limits(job.elastic), fit_to, lambda step: describe_samples(job, step, past.ends), warm_up=_WARM
    )


def _payload(job: Job, folder: Path, past: BatchHistory) -> dict[str, Any]:
    return {"job": job.model_dump(mode="json"), "folder": str(folder), "past": past.to_json()}


def _train_here(path: Path, overrides: Sequence[str], num_workers: int, world: World) -> None:
    """As one of the ranks that torchrun or srun has started; a mistake in the job is told by one of them."""
    try:
        if num_workers not in (0, world.size):
            what = f"{num_workers} were asked for, but {world.launcher} has started {world.size} workers"
            raise ConfigError([Problem("-n", what, "Leave it out.")])
        job = resolve_existing_paths(load_job(path, overrides).value, path)
        # A job that is resumed may have a micro-batch that it does not name: the session looks and checks.
        if not job.checkpoint.resume and (problems := check_workers(job, world.size)):
            raise ConfigError(problems)
    except UserError as error:
        print_error(error, report_turn(error, world, None))
        sys.exit(error.exit_code)
    add_job_folder_to_path(path)
    from closeranks.run.worker.entry import train_in_process

    train_in_process(job, str(path), overrides)


def add_job_folder_to_path(path: Path) -> None:
    """A job's own modules are looked for beside its file, then in the working folder."""
    sys.path[:0] = [str(path.resolve().parent), os.getcwd()]


def run_script(script: Path, arguments: Sequence[str], num_workers: int) -> None:
    if not script.is_file():
        raise UserError(f"there is no script at {script}", "Name a Python file; its own flags come after it.")
    if detect_world().launcher in _STARTED_ELSEWHERE:
        raise SetupError("`closeranks run` starts its own workers", f"Under torchrun or srun, start {script} itself.")
    folder = _folder_beside(script)
    work = _Work(
        entry="closeranks.run.worker.entry:script_entry",
        payload={"script": str(script), "args": list(arguments), "folder": str(folder)},
        folder=folder,
        must_finish=False,
    )
    _start(work, num_workers or num_gpus() or 1)


def _folder_beside(script: Path) -> Path:
    """Where the logs are kept until a session of the script says where it writes, and stay if none does."""
    wanted = Path("runs") / script.stem
    try:
        return make_free_folder(wanted)
    except OSError as error:
        raise unwritable_error(wanted, error) from error


@dataclass(frozen=True, slots=True)
class _Work:
    """What the workers shall do, and where it is written down."""

    entry: str
    payload: dict[str, Any]
    folder: Path
    is_new: bool = True
    """Whether the folder was made for this run."""
    preload: tuple[str, ...] = ()
    agent: AgentConfig = field(default_factory=AgentConfig)
    threads: int = 0
    log_every: int = 10
    report: bool = True
    command: tuple[str, tuple[str, ...]] = ("", ())
    must_finish: bool = True
    survival: RecoverySettings | None = None
    saves: bool = False
    """Whether the job wants its state saved."""
    on_turn: OnTick | None = None
    party: JobHosts = field(default_factory=JobHosts)


def _start(work: _Work, num_workers: int) -> None:
    plan = plan_for(
        work.entry, work.payload, work.folder, work.preload, work.agent, threads=work.threads, num_workers=num_workers
    )
    plan = replace(
        plan,
        recovery_settings=work.survival,
        is_elastic=work.survival is not None,
        rescues=work.saves,
        threads=work.threads,
        must_finish=work.must_finish,
        num_hosts=work.party.num_hosts,
        max_hosts=work.party.max_hosts,
    )
    failure = ""
    set_title("agent", str(work.folder))
    with ProgressDisplay(Console(), log_every=work.log_every) as progress:
        screen = _Screen(progress, work.folder)
        try:
            plan = replace(plan, join_endpoint=_door(work, progress.print_line))
            outcome = screen.watch(plan, work.on_turn)
        except CloseranksError as error:
            failure = str(error)
            if isinstance(error, UserError) and work.is_new and not screen.has_begun:
                remove_refused_folder(work.folder)
            raise
        finally:
            progress.close()
            if screen.has_begun:
                _write_down(work, screen.folder, failure)
    if outcome.reason != "finished":
        where = f". {outcome.rescued}" if outcome.rescued else f"; {_whereabouts(screen.folder, screen.saved)}"
        raise ENDINGS[outcome.reason](outcome.reason, f"Everything is stopped{where}")


def _door(work: _Work, on_note: Callable[[str], None]) -> JoinEndpoint | None:
    party = work.party
    if not party.accepts_hosts:
        return None
    drawn_at = (work.folder / "job.token").absolute()
    token = lead_token(party.token_file, job_token(), drawn_at, on_note)
    host, port = listen_address(party)
    token_file = party.token_file or ("" if job_token() else drawn_at)
    return JoinEndpoint(host, port, token, address=work.agent.host, token_file=str(token_file))


def parse_hosts(text: str) -> tuple[int, int]:
    """``2`` or ``1:4``: how many hosts it begins with, and up to how many it grows."""
    first, _, last = text.partition(":")
    if not (first.isdecimal() and (last or first).isdecimal() and 1 <= int(first) <= int(last or first)):
        raise ConfigError([Problem("--hosts", f"'{text}' is not a host count", "Write 2, or 1:4 to begin with 1.")])
    return int(first), int(last or first)


def plan_for(
    entry: str,
    payload: dict[str, Any],
    folder: Path,
    preload: tuple[str, ...],
    agent: AgentConfig,
    *,
    threads: int,
    num_workers: int,
) -> LaunchPlan:
    """What an agent of this host is told, for workers that do any of our entries."""
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


class _Screen:
    """Turns what the agent hears into what a person sees."""

    def __init__(self, progress: ProgressDisplay, folder: Path) -> None:
        self._progress = progress
        self.folder = folder
        """Where the run writes; a script's session may say otherwise."""
        self.saved = ""
        """Where the newest checkpoint lies, as far as rank 0 has told."""
        self.has_begun = False
        """Whether a run began, rather than being refused."""
        self._agent: Agent | None = None
        self._has_moved = False
        self._standing = StatusUpdater(folder, progress.print_line)
        self._agent_log: EventRecorder | None = None

    def watch(self, plan: LaunchPlan, on_turn: OnTick | None) -> JobOutcome:
        agent = self._agent = Agent(
            plan,
            on_event=self._on_event,
            on_output=self._on_output,
            on_note=self._progress.print_line,
            on_tick=self._standing.chained_with(on_turn),
        )
        ending = "failed"
        try:
            outcome = agent.run()
            ending = outcome.reason
            return outcome
        finally:
            self._standing.finish(ending)
            if self._agent_log is not None:
                self._agent_log.close()

    def _on_event(self, rank: int, fields: dict[str, Any]) -> None:
        event = decode(fields)
        if event is None or rank not in (0, AGENT):
            return
        if rank == 0:
            self.has_begun = True
            if isinstance(event, RunStarted) and event.folder:
                self._move(Path(display_path(event.folder)))
            elif isinstance(event, Saved):
                self.saved = event.path
        else:
            self._record(event)
        self._standing.handle(event)
        self._progress.handle(event)

    def _move(self, folder: Path) -> None:
        """A script's session has said where it writes: all that stands elsewhere so far goes there. A second session
        of the script has a folder of its own; the logs stay with the first."""
        first, self.folder = self.folder, folder
        self._standing.set_folder(folder)
        if not self._has_moved and self._agent is not None and first.absolute() != folder.absolute():
            self._agent.move_logs(folder / "logs")
            if self._agent_log is not None:
                self._agent_log.close()
                self._agent_log = None
            remove_refused_folder(first)
        self._has_moved = True

    def _record(self, event: Event) -> None:
        """What the agent itself saw: workers that were killed could not write it down."""
        if self._agent_log is None:
            self._agent_log = EventRecorder(self.folder, AGENT, must_open=False)
            self._agent_log.add_sink(lambda event: self._progress.handle(event) if isinstance(event, Warned) else None)
        self._agent_log.emit(event)

    def _on_output(self, rank: int, text: str) -> None:
        self._progress.print_output(text.rstrip("\n"))


def _whereabouts(folder: Path, saved: str) -> str:
    """``saved``: the checkpoint that was told of last, wherever it lies."""
    if saved and not Path(saved).is_relative_to(folder.absolute()):
        return f"continue with checkpoint.resume={saved}"
    if (folder / "checkpoints" / "latest").exists():
        return f"continue with checkpoint.resume={folder}"
    return f"the run folder is {folder}, but there was no time to save the state."


def _threads(wanted: int, num_workers: int) -> int:
    return wanted or thread_limit() or max(1, len(os.sched_getaffinity(0)) // num_workers)


def modules_of(job: Job) -> tuple[str, ...]:
    """Modules of the user's that the job names: imported once, before the workers are forked."""
    code = [getattr(job.model, "loss", ""), getattr(job.data, "collate", "")]
    names = [job.model.name, job.data.name, *code, *job.run.hooks]
    return tuple(dict.fromkeys(name.partition(":")[0] for name in names if is_import_path(name)))


def _write_down(work: _Work, folder: Path, failure: str) -> None:
    """Picture and page, from the run folder alone. A run that recorded nothing has neither."""
    if not work.report:
        return
    from closeranks.telemetry.reports.pages import write_pages

    job_file, overrides = work.command
    tell = Console(soft_wrap=True, highlight=False).print
    write_pages(folder, tell, job_file=job_file, overrides=overrides, failure=failure, is_script=not job_file)
