"""Traces steps with torch's profiler: those that the job names, and those that ``closeranks profile`` asks for.

[Note: a trace on request]
1. Rank 0 looks for a request in the run folder twice a second (``telemetry.traces.trace_mailbox``), takes it, and adds
   ``PROFILE`` to its ballot.
2. When the vote is read, after the same step on every rank, rank 0 broadcasts the request, and the ranks meet in a few
   small collectives, from which the offsets of their clocks follow (``telemetry.traces.clock_offsets``).
3. The next step is the profiler's warm-up, those after it are traced. Rank 0 answers which ones.
4. Each rank writes its own file. ``closeranks profile`` waits for all of them and merges them.

Invariant: a step that is not traced costs rank 0 a look at the clock, and the others nothing; no trace changes a number
or ends a run.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from closeranks.agent.detection.progress import WorkerPhase
from closeranks.core import phases
from closeranks.core.events import Event, Warned
from closeranks.core.requests import PROFILE
from closeranks.core.system.background_thread import BackgroundThread
from closeranks.core.system.linux import boot_id
from closeranks.parallel.mesh_groups import MeshGroups
from closeranks.run.builder.context import RunContext
from closeranks.run.components.component import Component
from closeranks.telemetry.profiler import StepProfiler
from closeranks.telemetry.run_log.run_folder import RunFolder
from closeranks.telemetry.traces.rank_tracer import RankIdentity, RankTracer
from closeranks.telemetry.traces.trace_mailbox import (
    TraceAnswer,
    TraceMailbox,
    TraceRequest,
    decode_request,
    encode_request,
)

if TYPE_CHECKING:
    from closeranks.elastic.vote import Ballot
    from closeranks.run.step.step_results import StepResult

_LOOK_S = 0.5
_LOOK_AGAIN_S = 60.0
"""After a request that could not be read or removed: one warning a minute is enough."""
_NUM_MEETINGS = 8
_MOST_SETTLING_STEPS = 4
"""Steps between a ballot and the first traced step, beside those of a synchronization interval: one until the vote is
read on an accelerator, one for the warm-up, and the first itself."""


class StepTraces(Component):
    def __init__(self, context: RunContext, folder: Path, emit: Callable[[Event], None]) -> None:
        self._context, self._folder, self._emit = context, RunFolder(folder), emit
        steps = context.job.telemetry.profile
        self._configured = StepProfiler.of(steps, folder, context.world.rank, emit) if steps.strip() else None
        self._mailbox = TraceMailbox(folder)
        self._look_at = 0.0
        self._asked: TraceRequest | None = None
        """On rank 0: taken, and not answered yet."""
        self._granted: TraceRequest | None = None
        self._instants: list[tuple[int, int]] = []
        self._tracer: RankTracer | None = None
        self._last_traced = 0
        self._writer = BackgroundThread("trace writer")

    def begin(self, index: int) -> None:
        step = index + 1
        if self._configured is not None:
            self._configured.step_end(index)
        if self._granted is not None:
            self._plan(self._granted, step)
            self._granted = None
        if self._tracer is not None:
            with nullcontext() if self._tracer.covers(step) else self._unhurried():
                self._tracer.begin(step)
            if self._tracer.is_done:
                self._tracer = None
        if self._configured is not None:
            self._configured.step_begin(step)

    def before_vote(self, index: int, ballot: Ballot) -> None:
        if not self._context.world.is_lead or index < self._last_traced or (now := time.monotonic()) < self._look_at:
            return
        self._look_at = now + _LOOK_S
        if self._asked is None and self._take(index + 1):
            ballot.requests |= {PROFILE}

    def settled(self, entry: StepResult, emit: Callable[[Event], None]) -> None:
        """Collective if a trace was asked for."""
        if PROFILE not in entry.requests:
            return
        world = self._context.groups.world
        text = world.broadcast_text(encode_request(self._asked) if self._asked is not None else "")
        self._granted = decode_request(text) if text else None
        self._instants = [self._meet() for _ in range(_NUM_MEETINGS)]

    def ended(self, num_done: int, emit: Callable[[Event], None]) -> None:
        if self._asked is not None:
            self._answer(TraceAnswer(self._asked.id, "the run ended before the trace began"))
        if self._tracer is not None:
            self._tracer.close()
        self._writer.close()
        if self._configured is not None:
            self._configured.close()

    def _take(self, step: int) -> bool:
        """Whether a request has arrived that can be granted; any other is answered. ``step`` is the current one."""
        try:
            found = self._mailbox.take()
        except (OSError, ValueError, TypeError) as error:
            self._look_at += _LOOK_AGAIN_S
            self._emit(Warned(f"a request for a trace was ignored: {error}", step))
            return False
        if found is None:
            return False
        refusal = found.problem(self._context.world.size) or self._overlap(step, found.num_steps)
        if refusal:
            self._answer(TraceAnswer(found.id, refusal))
            return False
        self._asked = found
        return True

    def _overlap(self, step: int, num_steps: int) -> str:
        """Why not, if the job names steps nearby: the profiler records one trace at a time."""
        if self._configured is None:
            return ""
        settling = _MOST_SETTLING_STEPS + self._context.sync_schedule.sync_interval
        first, last = self._configured.steps
        if last < step or first > step + settling + num_steps:
            return ""
        return f"the job traces steps {first} to {last} itself (telemetry.profile), and the run is at step {step}"

    def _meet(self) -> tuple[int, int]:
        """A collective that nobody leaves before everybody has entered it; when this rank did both."""
        enter_ns = time.time_ns()
        self._context.groups.world.sum(torch.zeros(1, device=self._context.device)).item()
        return enter_ns, time.time_ns()

    def _plan(self, request: TraceRequest, warmup_step: int) -> None:
        """The same on every rank, as all have begun the same step."""
        world, first = self._context.world, warmup_step + 1
        last = min(first + request.num_steps - 1, self._context.schedule.num_steps)
        self._last_traced = last
        if self._asked is not None:
            ranks = request.ranks or list(range(world.size))
            refusal = "" if first <= last else "the run ends with the next step"
            self._answer(TraceAnswer(request.id, refusal, first, last, world.generation, ranks))
        if first > last or not request.traces(world.rank):
            return
        path = self._folder.step_traces(first) / f"rank-{world.rank:05d}.json.gz"
        host, place = socket.gethostname(), place_in_layout(self._context.groups)
        identity = RankIdentity(request.id, world.rank, host, boot_id() or host, place)
        self._tracer = RankTracer((first, last), path, identity, self._instants, self._writer, self._warn)

    def _answer(self, answer: TraceAnswer) -> None:
        self._asked = None
        try:
            self._mailbox.answer(answer)
        except OSError as error:
            self._warn(f"`closeranks profile` gets no answer: {error.strerror or error}")

    def _warn(self, what: str) -> None:
        self._emit(Warned(what))

    @contextmanager
    def _unhurried(self) -> Iterator[None]:
        """Loading the profiler and writing a trace take seconds, which are no hang."""
        with self._context.step_timer.in_phase(WorkerPhase.SAVE), phases.phase(phases.TRACE):
            yield


def place_in_layout(groups: MeshGroups) -> str:
    """This rank's coordinates on the axes that have more than one rank, in words."""
    axes = {"data": groups.data, "tensor": groups.tensor, "pipeline": groups.pipeline}
    return " ".join(f"{name} {group.rank}" for name, group in axes.items() if group.size > 1)
