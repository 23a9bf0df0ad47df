"""Publishes the phase of a step that a worker is in, and measures the worker's own compute time.

The step calls ``begin`` when it opens, ``enter_phase`` at each phase, ``start`` when its data is there,
``micro_batch_done`` after each micro-batch, ``stop`` after the last, ``report_times`` when it is committed; the agent
reads all of it from outside.

[Note: own time] A slow rank makes all others wait, so step times do not show which rank is slow. What is measured is
forward and backward without the time spent waiting for others:

- on a CPU, with no collective inside them (replicas, zero=1): the elapsed time;
- on a CPU, with collectives inside (zero=2 and 3, tensor, pipeline): the time that the main thread was running or
  runnable. Asleep in a collective it is neither; throttled by a quota, or preempted by another process, it is runnable;
- on an accelerator, with no collective inside: by events on its stream. With collectives it is not measured, since a
  stream that waits for a collective looks busy.

Invariant: nothing here blocks. Cost of all of it in a step of one micro-batch, by timeit with real shared memory:
15-20 us, and 0.6 us for every further micro-batch; events on an accelerator (H200) cost 27 us a step.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any, Protocol

import torch

from closeranks.agent.detection.progress import WorkerPhase
from closeranks.core import phases
from closeranks.core.system.linux import ThreadClock
from closeranks.run.worker.agent_client import AgentClient, StandaloneClient

_PHASES = {
    WorkerPhase.START: phases.OTHER,
    WorkerPhase.HOOK: phases.USER_CODE,
    WorkerPhase.DATA: phases.DATA,
    WorkerPhase.COMPILE: phases.COMPILE,
    WorkerPhase.COMPUTE: phases.FORWARD,
    WorkerPhase.REDUCE: phases.OPTIMIZER,
    WorkerPhase.SNAPSHOT: phases.SNAPSHOT,
    WorkerPhase.VOTE: phases.VOTE,
    WorkerPhase.UPDATE: phases.OPTIMIZER,
    WorkerPhase.OUTER_STEP: phases.OUTER_STEP,
    WorkerPhase.EVALUATE: phases.EVALUATION,
    WorkerPhase.SAVE: phases.SAVE,
    WorkerPhase.END: phases.OTHER,
}
"""The phase of the clock in which each phase of progress begins. Waiting for the reduction is a phase of its own; the
rest of it, the gradient norm, is the optimizer's."""
_NUM_TIMES = 1000
"""Steps for which a rank keeps its own compute time."""


class Stopwatch(Protocol):
    """Measures from ``start`` to ``stop``; the times are available later, in order."""

    def start(self) -> None: ...

    def stop(self, num_micro: int) -> None: ...

    def pop_times(self) -> Sequence[float]:
        """Seconds per micro-batch of the steps measured since the last call."""
        ...

    def close(self) -> None: ...


class CpuStopwatch:
    """Measures with a clock of the host."""

    def __init__(self, clock: Callable[[], float], close: Callable[[], None] = lambda: None) -> None:
        self._clock, self.close = clock, close
        self._started_at = 0.0
        self._times: list[float] = []

    def start(self) -> None:
        self._started_at = self._clock()

    def stop(self, num_micro: int) -> None:
        self._times.append((self._clock() - self._started_at) / num_micro)

    def pop_times(self) -> Sequence[float]:
        times, self._times = self._times, []
        return times


class CudaStopwatch:
    """Measures with events on the current stream of an accelerator; they are read steps later, once it passed them."""

    def __init__(self) -> None:
        self._idle: list[torch.cuda.Event] = []
        self._started: torch.cuda.Event | None = None
        self._pending: deque[tuple[torch.cuda.Event, torch.cuda.Event, int]] = deque()

    def start(self) -> None:
        self._started = self._mark()

    def stop(self, num_micro: int) -> None:
        if self._started is not None:
            self._pending.append((self._started, self._mark(), num_micro))
            self._started = None

    def pop_times(self) -> Sequence[float]:
        times = []
        while self._pending and self._pending[0][1].query():
            first, last, num_micro = self._pending.popleft()
            self._idle += (first, last)
            times.append(first.elapsed_time(last) / 1000 / num_micro)
        return times

    def close(self) -> None: ...

    def _mark(self) -> torch.cuda.Event:
        event = self._idle.pop() if self._idle else torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class NullStopwatch:
    """For layouts in which a rank's own time cannot be separated from waiting for others."""

    def start(self) -> None: ...

    def stop(self, num_micro: int) -> None: ...

    def pop_times(self) -> Sequence[float]:
        return ()

    def close(self) -> None: ...


def make_stopwatch(device: torch.device, *, is_independent: bool) -> Stopwatch:
    """See [Note: own time]. ``is_independent``: no rank waits for another within forward and backward."""
    if device.type == "cuda":
        return CudaStopwatch() if is_independent else NullStopwatch()
    if is_independent:
        return CpuStopwatch(time.perf_counter)
    clock = ThreadClock()
    return CpuStopwatch(clock, clock.close)


class StepTimer:
    """The progress and the times of one worker's steps."""

    def __init__(
        self, agent_client: AgentClient | None, stopwatch: Stopwatch, *, pipeline_rank: int = 0, is_even: bool = True
    ) -> None:
        """``pipeline_rank``: ranks with the same one do the same work. ``is_even``: all ranks process micro-batches in
        step, so their counts can be compared."""
        self._agent_client = agent_client or StandaloneClient()
        self._stopwatch = stopwatch
        self._pipeline_rank, self._is_even = pipeline_rank, is_even
        self._step, self._phase = -1, WorkerPhase.START
        self._compute_times: deque[float] = deque(maxlen=_NUM_TIMES)
        self._compiler = _Compiler(self)

    def begin(self, step: int) -> None:
        """Step ``step`` is open (the first is 1). Until it takes its data, time is spent in the user's loop."""
        self._step = step
        self.enter_phase(WorkerPhase.HOOK)

    def enter_phase(self, phase: WorkerPhase) -> None:
        phases.switch(_PHASES[phase])
        self._publish(phase)

    @contextmanager
    def in_phase(self, phase: WorkerPhase) -> Iterator[None]:
        """A phase nested in another: hooks, a compiler."""
        outer = self._phase
        self._publish(phase)
        try:
            with phases.phase(_PHASES[phase]):
                yield
        finally:
            self._publish(outer)

    def _publish(self, phase: WorkerPhase) -> None:
        self._phase = phase
        self._agent_client.progress(self._step, phase)

    def start(self) -> None:
        self.enter_phase(WorkerPhase.COMPUTE)
        self._stopwatch.start()

    def micro_batch_done(self) -> None:
        self._agent_client.micro_batch_done(counts=self._is_even)

    def stop(self, num_micro: int) -> None:
        """All micro-batches are done. Until the commit, time is spent in the user's loop."""
        self._stopwatch.stop(num_micro)
        self.enter_phase(WorkerPhase.HOOK)

    def report_times(self) -> None:
        for seconds in self._stopwatch.pop_times():
            self._agent_client.note_compute_time(seconds, self._pipeline_rank)
            self._compute_times.append(seconds)

    @property
    def compute_s(self) -> float:
        """Median of this rank's own seconds per micro-batch since they were popped last; 0: none was measured."""
        return median(self._compute_times) if self._compute_times else 0.0

    def pop_compute_s(self) -> float:
        """``compute_s``, and measure anew."""
        compute_s = self.compute_s
        self._compute_times.clear()
        return compute_s

    def close(self) -> None:
        self._compiler.close()
        self._stopwatch.close()


class _Compiler:
    """Makes a compilation in the middle of a run a phase of its own, so that a step that takes a minute to compile is
    not taken for a hang. Active only if the compiler is imported already; importing it costs seconds."""

    def __init__(self, timer: StepTimer) -> None:
        self._timer = timer
        self._stack: list[Any] = []
        self._handler = sys.modules["torch._dynamo.callback"].callback_handler if _is_loaded() else None
        if self._handler is not None:
            self._handler.register_start_callback(self._begin)
            self._handler.register_end_callback(self._end)

    def _begin(self, *_: object) -> None:
        self._stack.append(inside := self._timer.in_phase(WorkerPhase.COMPILE))
        inside.__enter__()

    def _end(self, *_: object) -> None:
        if self._stack:
            self._stack.pop().__exit__(None, None, None)

    def close(self) -> None:
        handler, self._handler = self._handler, None
        if handler is not None:
            handler.remove_start_callback(self._begin)
            handler.remove_end_callback(self._end)


def _is_loaded() -> bool:
    return "torch._dynamo.callback" in sys.modules
