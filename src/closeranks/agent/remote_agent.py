"""The agent of a remote host, from joining a job to its end.

    connect, prove the token -> get the plan -> start the zygote -> join -> follow the leader's orders -> dismissed

Invariants: no worker is alive when it joins, and none outlives it; when it loses the leader it kills its workers before
the leader may count them as dead; it rejoins with its snapshot memory intact, and gives up only when no leader can be
found, after its snapshots have been rescued to disk.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from closeranks import __version__
from closeranks.agent.config import AgentConfig
from closeranks.agent.detection.hang_monitor import HangMonitor
from closeranks.agent.event_loop import EventLoop
from closeranks.agent.fault_limits import FaultLimits
from closeranks.agent.host.host_controller import HostController, LeaderLink
from closeranks.agent.host.local_host import LocalHost
from closeranks.agent.host.rescue import rescue_snapshots
from closeranks.agent.host.signals import deliver_signals
from closeranks.agent.launch_plan import AgentCallbacks, LaunchPlan, RecoverySettings
from closeranks.agent.membership.effects import ParticipationEnded
from closeranks.agent.membership.field_codecs import ProtocolError
from closeranks.agent.membership.follower import Follower
from closeranks.agent.membership.messages import Envelope
from closeranks.agent.transport.client import ControlClient
from closeranks.agent.transport.connection import ControlConnection
from closeranks.agent.transport.host_connections import ASK_PLAN, PLAN
from closeranks.agent.transport.token import JobToken
from closeranks.core.errors import RunFailed, SetupError
from closeranks.core.system.environment import child_environment, thread_limit

_MOST_REFUSED = 3
"""Consecutive answers without the right token after which the host gives up."""
_LEAVE_S = 30.0
"""How long a host that was asked to leave waits for its workers to be out of the run."""
_GIVE_UP_S = 30.0
"""How long it looks for a leader that it has lost."""
_DESERTED_S = 3.0
"""The same where the leader's machine refuses the connection, because nothing listens there any more."""


class RemoteAgent:
    """This host's part in a job whose leader is on another host. ``run`` blocks until it is over."""

    def __init__(
        self, address: str, token: JobToken, *, name: str = "", num_workers: int, on_note: Callable[[str], None]
    ) -> None:
        """``name`` empty: the machine's host name, made unique if the leader has the same one."""
        self._address = address
        self._token = token
        self._is_named = bool(name)
        self._name = name or socket.gethostname()
        self._num_workers = num_workers
        self._on_note = on_note
        self._loop: EventLoop | None = None
        self._client: ControlClient | None = None
        self._host: LocalHost | None = None
        self._host_controller: HostController | None = None
        self._limits: FaultLimits | None = None
        self._folder = Path()
        self._job = ""
        self._end: ParticipationEnded | None = None
        self._leave_by: float | None = None

    def run(self) -> str:
        """Returns why it is over. Raises ``SetupError`` for a job it cannot join, ``RunFailed`` if the leader was
        lost."""
        with EventLoop() as loop, deliver_signals(loop, self._on_signal):
            self._loop = loop
            self._client = ControlClient(
                loop,
                self._address,
                self._token,
                on_open=self._on_open,
                on_message=self._on_message,
                on_close=self._on_close,
                on_note=self._on_note,
            )
            try:
                while self._end is None:
                    loop.run_once(self._tick())
                return self._conclude(self._end)
            finally:
                if self._host is not None:
                    self._host.__exit__(None, None, None)
                self._client.close()

    def _tick(self) -> float | None:
        assert self._client is not None
        self._client.wake()
        if self._host_controller is None and self._client.num_refused >= _MOST_REFUSED:
            fix = "Check that it is the leader, of this version, and pass its token (--token-file, CLOSERANKS_TOKEN)."
            raise SetupError(self._client.last_error.rstrip("."), fix)
        now = time.monotonic()
        if self._host is not None and self._host_controller is None:
            self._start_host_controller(self._host, now)
        until = [self._client.deadline, self._leave_by, self._check_deserted(now)]
        if self._host_controller is not None:
            until.append(self._host_controller.tick(now))
        if self._leave_by is not None and now >= self._leave_by:
            self._end = self._end or ParticipationEnded("it was asked to leave")
        if self._end is not None:
            return now
        return min((at for at in until if at is not None), default=None)

    def _check_deserted(self, now: float) -> float | None:
        since = self._client.refused_since if self._client is not None else None
        if since is None or self._host is None:
            return None
        if now >= since + _DESERTED_S:
            self._abandon("nothing listens there any more")
        return since + _DESERTED_S

    def _abandon(self, reason: str) -> None:
        """The leader is lost: end, with the snapshots written to disk once no worker is alive."""
        if self._host_controller is not None:
            self._host_controller.abandon(reason)
        else:
            self._end = self._end or ParticipationEnded(reason, is_lost=True)

    def _start_host_controller(self, host: LocalHost, now: float) -> None:
        """Join once the zygote can fork."""
        if host.error is not None:
            raise host.error
        if not host.is_ready:
            return
        assert self._loop is not None
        hang_monitor = HangMonitor(self._limits, self._loop) if self._limits else None
        follower = Follower(self._name, time.time_ns(), self._num_workers, now=now, give_up_s=_GIVE_UP_S)
        self._host_controller = HostController(host, follower, hang_monitor, LeaderLink(self._send, self._on_end))

    # --- the connection to the leader

    def _on_open(self, connection: ControlConnection) -> None:
        """Request the plan on every connection: another job may be running at that address by now."""
        connection.send(ASK_PLAN)
        if self._host_controller is not None:
            self._host_controller.on_connected()

    def _on_message(self, connection: ControlConnection, fields: Any) -> None:
        if isinstance(fields, dict) and fields.get("kind") == PLAN:
            self._on_plan(fields.get("plan"), fields.get("lead"), connection)
            return
        try:
            envelope = Envelope.from_fields(fields)
        except ProtocolError as error:
            connection.refuse(f"sent an invalid message: {error}")
            return
        if self._host_controller is not None:
            self._host_controller.receive(envelope)

    def _on_close(self, connection: ControlConnection, why: str) -> None:
        self._on_note(f"The leader at {self._address} {why}; looking for it again.")
        if self._host_controller is not None:
            self._host_controller.on_disconnected()

    def _send(self, envelope: Envelope) -> None:
        assert self._client is not None
        self._client.send(envelope.to_fields())

    def _on_end(self, end: ParticipationEnded) -> None:
        self._end = end

    # --- this host

    def _on_plan(self, fields: Any, leader: Any, connection: ControlConnection) -> None:
        if self._host is not None:
            if fields.get("job") != self._job:
                self._abandon("another job runs there now")
            return
        if leader == self._name:
            if self._is_named:
                raise SetupError(f"the leader's host is called {leader} too", "Give this one another --name.")
            self._name = f"{self._name}-{os.getpid()}"
        try:
            if fields["version"] != __version__:
                what = f"the leader has closeranks {fields['version']}, this host {__version__}"
                raise SetupError(what, "Install the same version on all hosts.")
            plan = self._plan_of(fields, connection.local_host)
            self._folder.mkdir(parents=True, exist_ok=True)
            os.chdir(fields["cwd"])  # the job's relative paths start where its leader was started
        except OSError as error:
            fix = "Run folder and working folder must be on a file system that all hosts share, under the same path."
            raise SetupError(f"{error.filename or self._folder} cannot be used here ({error.strerror})", fix) from None
        except (KeyError, TypeError, ValueError) as error:
            fix = "Use the same version on all hosts."
            raise SetupError(f"the leader's plan cannot be read ({error})", fix) from None
        self._start_host(plan)

    def _plan_of(self, fields: dict[str, Any], local_host: str) -> LaunchPlan:
        self._job, self._folder = fields["job"], Path(fields["log_folder"])
        self._limits = FaultLimits(**fields["limits"]) if fields["limits"] else None
        threads = int(fields["threads"]) or thread_limit() or max(1, _num_cores() // self._num_workers)
        settings = None
        if self._limits is not None:  # the leader decides about recovery, so the callbacks are stubs
            settings = RecoverySettings(self._limits, lambda *_: None, lambda step: "", warm_up=fields["warm"])
        return LaunchPlan(
            num_workers=self._num_workers,
            entry=fields["entry"],
            payload=fields["payload"],
            log_folder=self._folder,
            environment=child_environment(threads),
            config=AgentConfig(host=local_host),
            preload=tuple(fields["preload"]),
            sys_path=tuple(fields["sys_path"]),
            recovery_settings=settings,
            is_elastic=settings is not None,
            zygote_log=f"zygote-{self._name}.log",
        )

    def _start_host(self, plan: LaunchPlan) -> None:
        assert self._loop is not None
        workers = "1 worker" if self._num_workers == 1 else f"{self._num_workers} workers"
        self._on_note(f"Joining the job at {self._address} as {self._name} with {workers}; its run is {self._run}.")
        callbacks = AgentCallbacks(self._on_event, self._on_output, self._note)
        self._host = LocalHost(plan, self._loop, callbacks, name=self._name, on_store=self._on_store)

    @property
    def _run(self) -> Path:
        return self._folder.parent

    def _note(self, text: str) -> None:
        """Show a note to the user, here and where the job was started."""
        self._on_note(text)
        if self._host_controller is not None:
            self._host_controller.callbacks.on_note(text)

    def _on_event(self, rank: int, fields: dict[str, Any]) -> None:
        """Relay rank 0's events only: those of other ranks are in their own files, and would only load the leader."""
        if self._host_controller is not None and rank == 0:
            self._host_controller.callbacks.on_event(rank, fields)

    def _on_output(self, rank: int, line: str) -> None:
        if self._host_controller is not None:
            self._host_controller.callbacks.on_output(rank, line)

    def _on_store(self, address: str) -> None:
        if self._host_controller is not None:
            self._host_controller.announce_store(address)

    def _on_signal(self, signum: int) -> None:
        if signum == signal.SIGUSR1:
            self._on_note("SIGUSR1: only the leader can save. Send it there.")
        elif self._leave_by is not None or self._host_controller is None:
            self._end = self._end or ParticipationEnded("it was asked to leave")
        else:
            self._leave_by = time.monotonic() + _LEAVE_S
            self._on_note("Leaving the job at the next step. Send the signal again to leave at once.")
            self._host_controller.leave("it was asked to leave")

    def _conclude(self, end: ParticipationEnded) -> str:
        must_rescue = end.is_lost or end.rescues
        saved = (
            rescue_snapshots(self._host.snapshot_memory, self._run, self._name, is_part=True)
            if self._host and must_rescue
            else ""
        )
        if not end.is_lost:
            return f"{end.reason}. {saved.rstrip('.')}" if saved else end.reason
        raise RunFailed(f"the leader at {self._address} was lost, and the job with it: {end.reason}. {saved}".rstrip())


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))
