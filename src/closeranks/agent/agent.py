"""How does one host run a job, from the first fork to the last exit?

    agent (this process, no torch)
      `-- zygote (has imported the job's modules)
            `-- worker 0 .. worker n-1, forked

Invariant: when ``run`` is over, whichever way, no process, port, shared memory or signal handler of its own is left. If
the agent is killed, the kernel kills the zygote for it, and the workers for the zygote.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

from closeranks.agent.crew import Crew
from closeranks.agent.ending import REAP_S, Situation, Stop, counts_as_failure, next_move, on_signal
from closeranks.agent.launch import LaunchPlan, Listener, Outcome
from closeranks.agent.loop import Loop
from closeranks.agent.nursery import Nursery
from closeranks.agent.stops import heard_by
from closeranks.core.errors import SetupError
from closeranks.core.events import Resumed, Saved


class Agent:
    """Runs the workers of a plan. ``run`` blocks; all callbacks come from it, in this thread."""

    def __init__(
        self,
        plan: LaunchPlan,
        *,
        on_event: Callable[[int, dict[str, Any]], None],
        on_output: Callable[[int, str], None],
        on_note: Callable[[str], None],
    ) -> None:
        self._plan = plan
        self._listener = Listener(self._on_event, on_output, on_note)
        self._tell_event = on_event
        self._has_saved = False
        """Whether there is a checkpoint to go on from, as far as the workers have told."""
        self._stop: Stop | None = None
        self._crew: Crew | None = None

    def run(self) -> Outcome:
        """The outcome of a run that finished or was asked to stop.

        Raises the ``UserError`` that a worker raised or that an import came to, or ``RunFailed`` with the report of a
        worker that died or raised anything else.
        """
        _make_folder(self._plan)
        with Loop() as loop, heard_by(loop, self._on_signal), Nursery(self._plan, loop, self._listener) as nursery:
            while not (nursery.is_ready or nursery.error or self._stop):
                loop.turn()
            if nursery.error:
                raise nursery.error
            if self._stop:
                return Outcome(self._stop.reason)
            with Crew(self._plan, 0, nursery, loop, self._listener) as crew:
                self._crew = crew
                self._watch(loop, nursery, crew)
                return self._conclude(nursery, crew)

    def _on_event(self, rank: int, event: dict[str, Any]) -> None:
        is_resumed = event.get("event") == Resumed.name and bool(event.get("step"))  # at step 0: weights alone
        self._has_saved = self._has_saved or is_resumed or event.get("event") == Saved.name
        self._tell_event(rank, event)

    def _watch(self, loop: Loop, nursery: Nursery, crew: Crew) -> None:
        while (move := next_move(self._situation(nursery, crew))).action != "end":
            if move.action == "fence":
                crew.fence()
            else:
                loop.turn(move.until)

    def _situation(self, nursery: Nursery, crew: Crew) -> Situation:
        now = time.monotonic()
        is_lost = nursery.error is not None
        return Situation(
            now=now,
            num_left=crew.num_left,
            failed_at=now if is_lost else crew.failed_at,
            all_spoken=is_lost or crew.all_spoken,
            stop=self._stop,
            fenced_at=crew.fenced_at,
        )

    def _on_signal(self, signum: int) -> None:
        if signum != signal.SIGUSR1:
            self._on_stop(signum)
        elif self._crew is None or self._stop is not None:
            self._listener.on_note("SIGUSR1: there is nothing to save now.")
        else:
            self._listener.on_note("SIGUSR1: all ranks save after the same step, and go on.")
            self._crew.request(drain=False, save=True)

    def _on_stop(self, signum: int) -> None:
        """Each signal is answered with a note; the first also reaches the workers."""
        config = self._plan.config
        last, now = self._stop, time.monotonic()
        self._stop = on_signal(last, signum, now, grace_s=config.grace_s, interrupt_s=config.interrupt_s)
        if self._stop == last:
            return
        name = "Ctrl-C" if signum == signal.SIGINT else "SIGTERM"
        if self._crew is None or self._stop.deadline <= now:
            self._listener.on_note(f"{name}: stopping now.")
            return
        again = " Press it again to stop at once." if signum == signal.SIGINT else ""
        patience = f"{self._stop.deadline - now:.3g} s"
        self._listener.on_note(f"{name}: finishing the step and saving, for at most {patience}.{again}")
        if last is None:
            self._crew.request(drain=True, save=True)

    def _conclude(self, nursery: Nursery, crew: Crew) -> Outcome:
        self._tell_of_survivors(crew)
        if nursery.error is not None:
            raise nursery.error
        if counts_as_failure(crew.failed_at, self._stop):
            raise crew.verdict().error
        if crew.failed_at is not None:
            self._listener.on_note(f"While stopping, {crew.verdict().error}")
        if self._stop is not None:
            self._tell_of_killed(crew)
            return Outcome(self._stop.reason, crew.statuses)
        return Outcome("drained" if crew.has_drained else "finished", crew.statuses)

    def _tell_of_killed(self, crew: Crew) -> None:
        killed = [str(member.world.rank) for member in crew.members if member.is_fenced]
        if killed:
            last = " The last save stands." if self._has_saved else ""
            self._listener.on_note(f"Killed before they were done: rank {', '.join(killed)}.{last}")

    def _tell_of_survivors(self, crew: Crew) -> None:
        for member in crew.members:
            if not member.is_over:
                who = f"Rank {member.world.rank} (process {member.pid})"
                why = "it hangs in the kernel, in a device driver or a network file system perhaps"
                self._listener.on_note(f"{who} was killed but has not ended within {REAP_S:g} s: {why}.")


def _make_folder(plan: LaunchPlan) -> None:
    try:
        plan.log_folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fix = "Choose another folder for the run, or make this one writable."
        raise SetupError(f"the folder {plan.log_folder} cannot be made ({error.strerror})", fix) from None
