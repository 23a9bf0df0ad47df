"""The agent's handle of one worker process: its messages, output, progress, death and exit status.

Invariant: a worker is signalled only through its pidfd, never by process id, so that a fence cannot hit another
process; what it sent and printed before its death is read to the end.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from closeranks.agent.detection.failure import FailureReport
from closeranks.agent.detection.process_probe import ask_children_for_stacks, ask_for_stacks, is_stack_line
from closeranks.agent.detection.progress import PHASE_WORDS, SharedProgress, WorkerProgress, create_progress_fd
from closeranks.agent.detection.root_cause import WorkerReport
from closeranks.agent.detection.standstill.collective_record import CollectiveRecord
from closeranks.agent.detection.standstill.rank_evidence import NEWEST_SENT, RankEvidence
from closeranks.agent.event_loop import EventLoop
from closeranks.agent.launch_plan import AgentCallbacks, LaunchPlan
from closeranks.agent.workers.output import OutputLog
from closeranks.agent.workers.wire import Message, WorkerChannel, WorkerFds
from closeranks.core.world import World

_TAIL_LINES = 12


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    """What the workers of a generation on one host are started with."""

    payload: Mapping[str, Any]
    address: str
    """Where rank 0's store listens, if rank 0 is on this host."""
    snapshot_paths: list[list[str]]
    on_store: Callable[[str], None]


class WorkerProcess:
    """One worker of a generation, from before its fork until after its death."""

    def __init__(
        self, world: World, plan: LaunchPlan, loop: EventLoop, callbacks: AgentCallbacks, setup: WorkerSetup
    ) -> None:
        self.world = world
        self.pid: int | None = None
        self.status: int | None = None
        self.died_at: float | None = None
        self.failure: FailureReport | None = None
        self._has_returned = False
        self._must_finish = plan.must_finish
        self._ended_for: tuple[str, ...] = ()
        self.got_sigterm = False
        """Whether it got a SIGTERM of its own, and reported it to the agent."""
        self.is_fenced = self._asked_for_stacks = False
        self.listener = callbacks
        self._loop = loop
        self._on_store = setup.on_store
        self._failure_received_at: float | None = None
        self._is_orphaned = False
        self._pidfd: int | None = None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._channel = WorkerChannel(ours)
        progress_fd = create_progress_fd()
        self._progress, self._collectives = SharedProgress(progress_fd), CollectiveRecord(progress_fd)
        self._log = OutputLog(plan.log_folder / f"rank-{world.rank:05d}.log", self._on_text, self._on_note)
        self.fds = WorkerFds(theirs.detach(), progress_fd, self._log.take_writer())
        loop.watch(ours, self._on_link)
        loop.watch(self._log.reader, self._on_output)
        hello = {"type": "hello", "world": asdict(world), "entry": plan.entry, "payload": dict(setup.payload)}
        self.send({**hello, "host": setup.address, "port": plan.config.port, "boxes": setup.snapshot_paths})

    # --- actions

    def move_log(self, folder: Path) -> None:
        self._log.move(folder)

    def send(self, message: Message) -> None:
        """Send a message. One to a worker that is gone is dropped: others may still broadcast before the fence."""
        if self._channel.endpoint not in self._loop:
            return
        self._channel.send(message)
        self._loop.watch_writable(self._channel.endpoint, bool(self._channel.outbox))

    def fence(self) -> None:
        """Send SIGKILL, unless it is dead already. A worker that is not forked yet is killed as soon as it is."""
        if self.is_dead:
            return
        self.is_fenced = True
        if self._pidfd is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    # --- callbacks of the zygote client

    def on_forked(self, pid: int, pidfd: int) -> None:
        self.pid, self._pidfd = pid, pidfd
        self._loop.watch(pidfd, self._on_death)
        if self.is_fenced:
            self.fence()

    def on_exited(self, status: int) -> None:
        """Reported by the zygote, which may be slower than the pidfd."""
        if self.pid is not None:
            self._on_death()
        self.status = status

    def on_zygote_lost(self) -> None:
        self._is_orphaned = True

    # --- state

    @property
    def is_dead(self) -> bool:
        return self.status is not None or (self._pidfd is not None and self._pidfd not in self._loop)

    @property
    def awaits_status(self) -> bool:
        return self.is_dead and self.status is None

    @property
    def is_over(self) -> bool:
        """Whether it is dead, and its exit status is known or cannot be learned any more."""
        return self.status is not None or (self._is_orphaned and (self._pidfd is None or self.is_dead))

    @property
    def has_reported(self) -> bool:
        """Whether its part in a failure is known: from its own report or its exit status."""
        return self.failure is not None or self.is_over

    @property
    def failed_at(self) -> float | None:
        if self._failure_received_at is not None:
            return self._failure_received_at
        if self.died_at is None or (self.is_finished and not self.status):
            return None
        return self.died_at

    @property
    def is_finished(self) -> bool:
        """Whether it has done its work: its entry returned, or it is a script that exited with 0."""
        return self._has_returned or (self.status == 0 and not self._must_finish)

    @property
    def progress(self) -> WorkerProgress:
        return self._progress.read()

    def evidence(self, now: float) -> RankEvidence:
        """What its shared memory tells, also after its death."""
        progress = self._progress.read()
        return RankEvidence(
            rank=self.world.rank,
            step=progress.step,
            phase=progress.phase,
            age_s=max(0.0, now - progress.at),
            collectives=self._collectives.read(NEWEST_SENT),
            groups=self._collectives.groups(),
        )

    @property
    def alive_at(self) -> float:
        """When it last showed progress. Heavy printing counts: it may be blocked in a write until the agent reads,
        which is no hang."""
        return max(self._progress.read().at, self._log.printing_at)

    @property
    def died_silently(self) -> bool:
        """Whether it died without a report: the root cause is known without the reports of others."""
        return self.died_at is not None and self.failure is None and not self.is_finished

    def ask_children_for_stacks(self) -> None:
        """Make the processes of its data loader print their stacks into its log."""
        if self.pid is not None and not self.is_dead:
            self._asked_for_stacks = True
            ask_children_for_stacks(self.pid)

    def ask_for_stacks(self) -> None:
        """Make its threads print their stacks into its log; a worker that is stopped or gone prints nothing."""
        if self._pidfd is not None and not self.is_dead:
            self._asked_for_stacks = True
            ask_for_stacks([self._pidfd])

    def finish_output(self) -> None:
        """The process is gone: pass on what it printed last."""
        self._log.finish()

    def log_tail(self, num_lines: int) -> tuple[str, ...]:
        return self._log.tail(num_lines)

    def report(self) -> WorkerReport:
        progress = self._progress.read()
        return WorkerReport(
            rank=self.world.rank,
            step=progress.step,
            phase=PHASE_WORDS[progress.phase],
            status=self.status,
            died_at=self.died_at,
            is_finished=self.is_finished,
            failure=self.failure,
            ended_for=self._ended_for,
            log=str(self._log.path),
            log_tail=self._log.tail(_TAIL_LINES),
        )

    # --- messages and output

    def _on_link(self) -> None:
        self._channel.flush()
        for message in self._channel.receive() or ():
            self._on_message(message)
        if self._channel.is_open:
            self._loop.watch_writable(self._channel.endpoint, bool(self._channel.outbox))
        else:
            self._loop.unwatch(self._channel.endpoint)

    def _on_message(self, message: Message) -> None:
        match message["type"]:
            case "event":
                self.listener.on_event(self.world.rank, message["event"])
            case "store":
                self._on_store(message["address"])
            case "failure":
                self.failure = FailureReport(**message["failure"])
                self._failure_received_at = time.monotonic()
                self._log.add(self.failure.traceback)
            case "finished":
                self._has_returned = True
                self._ended_for = tuple(message["ended_for"])
            case "told":
                self.got_sigterm = True
            case "dropped":
                self._on_note(f"Rank {self.world.rank} dropped {message['count']} events: the agent was too slow.")

    def _on_text(self, text: str) -> None:
        """Show what it printed, except stacks that it was asked for: those stay in its log."""
        if self._asked_for_stacks:
            text = "\n".join(line for line in text.split("\n") if not is_stack_line(line))
        if self.world.is_lead and (text or not self._asked_for_stacks):
            self.listener.on_output(self.world.rank, text)

    def _on_note(self, text: str) -> None:
        self.listener.on_note(text)

    def _on_output(self) -> None:
        self._log.read()
        if not self._log.is_open:
            self._loop.unwatch(self._log.reader)

    def _on_death(self) -> None:
        """The pidfd is ready: record the time, then read all messages and output that are left."""
        if self._pidfd is None or self._pidfd not in self._loop:
            return
        self._loop.unwatch(self._pidfd)
        if not self.is_fenced:
            self.died_at = time.monotonic()
        while self._channel.is_open and (messages := self._channel.receive()) is not None:
            for message in messages:
                self._on_message(message)
        self._log.drain()

    def close(self) -> None:
        for source in (self._channel.endpoint, self._log.reader):
            self._loop.unwatch(source)
        self._channel.close()
        self._log.close()
        self._progress.close()
        self._collectives.close()
        if self._pidfd is not None:
            self._loop.unwatch(self._pidfd)
            os.close(self._pidfd)
