"""Runs a job from the agent that starts it: zygote, workers, signals and the final outcome.

    agent (this process, no torch)
      |-- zygote (has imported the job's modules)
      |     `-- worker 0 .. worker n-1, forked, generation after generation
      `-- snapshot memory: copies of the state, which outlive the workers

Invariant: when ``run`` returns or raises, no process, port, shared memory or signal handler of its own is left. If the
agent is killed, the kernel kills the zygote, then the zygote's workers, and frees the snapshot memory; a standby zygote
ends when its control socket closes.
"""

from __future__ import annotations

import math
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from closeranks.agent.event_loop import EventLoop
from closeranks.agent.host.local_host import LocalHost
from closeranks.agent.host.rescue import rescue_snapshots
from closeranks.agent.host.signals import deliver_signals
from closeranks.agent.job.job_controller import JobController, OnTick
from closeranks.agent.job.shutdown import ShutdownRequest, shutdown_on_signal
from closeranks.agent.launch_plan import AgentCallbacks, JobOutcome, LaunchPlan
from closeranks.core.errors import CloseranksError, RunFailed, SetupError
from closeranks.core.events import Resumed, Saved
from closeranks.core.requests import DRAIN, SAVE


class Agent:
    """Runs the workers of a plan. ``run`` blocks; all callbacks come from it, in this thread."""

    def __init__(
        self,
        plan: LaunchPlan,
        *,
        on_event: Callable[[int, dict[str, Any]], None],
        on_output: Callable[[int, str], None],
        on_note: Callable[[str], None],
        on_tick: OnTick | None = None,
    ) -> None:
        self._plan = plan
        self._callbacks = AgentCallbacks(self._on_event, on_output, on_note)
        self._tell_event = on_event
        self._on_tick = on_tick
        self._saved_step = -1
        """Step of the newest checkpoint to resume from, as far as the workers have reported; -1: there is none."""
        self._controller: JobController | None = None
        self._host: LocalHost | None = None

    def run(self) -> JobOutcome:
        """The outcome of a run that finished or was asked to stop.

        Raises the ``UserError`` of a worker or of a failed import, or ``RunFailed`` with the report of a worker that
        died or raised anything else, if the run did not recover from it.
        """
        plan = self._plan
        _make_folder(plan)
        with EventLoop() as loop, deliver_signals(loop, self._on_signal):
            controller = self._controller = JobController(plan, loop, self._callbacks, self._on_tick, self._has_unsaved)
            with LocalHost(
                plan, loop, controller.callbacks, name=socket.gethostname(), on_store=controller.announce_store
            ) as host:
                self._host = host
                try:
                    outcome = controller.run(host)
                except CloseranksError as error:
                    raise self._rescued(host, error) from error.__cause__
                self._note_killed(outcome, controller.killed)
                is_cut = (
                    bool(controller.killed) and controller.stop is not None and not self._is_at_once(controller.stop)
                )
                return replace(outcome, rescued=self._rescue(host, plan.config.interrupt_s)) if is_cut else outcome

    def move_logs(self, folder: Path) -> None:
        """A script has named its output folder: its logs are moved there, too."""
        if self._host is not None:
            self._host.move_logs(folder)

    def _on_event(self, rank: int, event: dict[str, Any]) -> None:
        is_resumed = event.get("event") == Resumed.name and bool(event.get("step"))  # at step 0: weights alone
        if rank == 0 and (is_resumed or event.get("event") == Saved.name):
            self._saved_step = max(self._saved_step, int(event.get("step", 0)))
        self._tell_event(rank, event)

    def _rescued(self, host: LocalHost, error: CloseranksError) -> CloseranksError:
        """The run has failed: rescue its state, and add to the error where it was written."""
        sentence = self._rescue(host)
        if isinstance(error, RunFailed):  # only ``what`` is shown of it
            error.what = f"{error.what}\n{sentence}".rstrip()
        else:
            error.fix = f"{error.fix} {sentence}".strip()
        return error

    def _rescue(self, host: LocalHost, timeout_s: float = math.inf) -> str:
        """Write the snapshots that are newer than the newest checkpoint to disk; returns where, in a sentence. Every
        worker is gone by now, so the snapshots no longer change."""
        if not self._has_unsaved(host) or host.group_status.num_left:
            return ""
        return rescue_snapshots(
            host.snapshot_memory, self._plan.log_folder.parent, host.name, timeout_s, is_part=self._plan.max_hosts > 1
        )

    def _has_unsaved(self, host: LocalHost) -> bool:
        """Whether snapshot memory holds a newer state than the newest checkpoint."""
        newest = max(
            (
                progress.snapshot_step
                for progress in (worker.progress for worker in host.workers)
                if progress.snapshot_step
            ),
            default=-1,
        )
        return self._plan.rescues and newest > self._saved_step

    def _is_at_once(self, stop: ShutdownRequest) -> bool:
        """Whether the user has interrupted again, to stop without waiting."""
        config = self._plan.config
        return stop.deadline < stop.since + min(config.grace_s, config.interrupt_s)

    def _on_signal(self, signum: int) -> None:
        controller = self._controller
        if signum != signal.SIGUSR1:
            self._on_stop(signum)
        elif controller is None or not controller.has_generation or controller.stop is not None:
            self._callbacks.on_note("SIGUSR1: there is nothing to save now.")
        else:
            self._callbacks.on_note("SIGUSR1: all ranks save after the same step and continue.")
            controller.request(SAVE)

    def _on_stop(self, signum: int) -> None:
        """Report each signal in a note; the first is also passed to the workers."""
        controller, config, now = self._controller, self._plan.config, time.monotonic()
        assert controller is not None
        last = controller.stop
        controller.stop = shutdown_on_signal(last, signum, now, grace_s=config.grace_s, interrupt_s=config.interrupt_s)
        if controller.stop == last:
            return
        name = "Ctrl-C" if signum == signal.SIGINT else signal.Signals(signum).name
        if not controller.has_generation or controller.stop.deadline <= now:
            self._callbacks.on_note(f"{name}: stopping now.")
            return
        again = " Press it again to stop at once." if signum == signal.SIGINT else ""
        grace = f"{controller.stop.deadline - now:.3g} s"
        self._callbacks.on_note(f"{name}: finishing the step and saving, for at most {grace}.{again}")
        if last is None:
            controller.request(DRAIN)

    def _note_killed(self, outcome: JobOutcome, killed: Sequence[int]) -> None:
        if killed and outcome.reason != "finished":
            last = " The last checkpoint is valid." if self._saved_step >= 0 else ""
            ranks = f"rank{'s' if len(killed) > 1 else ''} {', '.join(map(str, killed))}"
            self._callbacks.on_note(f"Killed before they were done: {ranks}.{last}")


def _make_folder(plan: LaunchPlan) -> None:
    try:
        plan.log_folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fix = "Choose another folder for the run, or make this one writable."
        raise SetupError(f"the folder {plan.log_folder} cannot be created ({error.strerror})", fix) from None
