"""Where does a worker stand within a step, and what does the step cost it alone?

The step calls ``begin`` when it opens, ``enter`` at each phase, ``start`` when its data is there, ``tick`` after each
micro-batch, ``stop`` after the last, ``tell`` when it is committed; whoever oversees the worker reads it from outside.

[Note: own time] A slow rank makes all others wait, so the time of a step tells nobody apart. What counts is forward and
backward without waiting for others:

- on a CPU, where no collective is inside them (replicas, zero=1): the time that went by;
- with collectives inside (zero=2 and 3, tensor, pipeline): the time that the main thread ran or was ready to. Asleep in
  a collective it is neither; throttled by a quota, or crowded out by another process, it is ready;
- on an accelerator, by events on its stream, where no collective is inside; elsewhere not at all, since a stream that
  waits for a collective looks busy.

Invariant: nothing here waits. Cost of all of it in a step of one micro-batch, by timeit against a real word: 15-20 us,
and 0.6 us for every further micro-batch; events on an accelerator (H200) cost 27 us a step.
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

from closeranks.agent.progress import Phase
from closeranks.core.linux import ThreadClock
from closeranks.run.overseer import Alone, Overseer

_NUM_OWN = 1000
"""Steps of which a rank remembers its own time."""


class Stopwatch(Protocol):
    """Measures from ``start`` to ``stop``; what came of it is there later, in order."""

    def start(self) -> None: ...

    def stop(self, num_micro: int) -> None: ...

    def taken(self) -> Sequence[float]:
        """Seconds per micro-batch of the steps that are measured by now, each told once."""
        ...

    def close(self) -> None: ...


class ClockWatch:
    """By a clock of the host's."""

    def __init__(self, clock: Callable[[], float], close: Callable[[], None] = lambda: None) -> None:
        self._clock, self.close = clock, close
        self._started_at = 0.0
        self._taken: list[float] = []

    def start(self) -> None:
        self._started_at = self._clock()

    def stop(self, num_micro: int) -> None:
        self._taken.append((self._clock() - self._started_at) / num_micro)

    def taken(self) -> Sequence[float]:
        taken, self._taken = self._taken, []
        return taken


class DeviceWatch:
    """By events on the current stream of an accelerator; they are read when it has passed them, steps later."""

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

    def taken(self) -> Sequence[float]:
        taken = []
        while self._pending and self._pending[0][1].query():
            first, last, num_micro = self._pending.popleft()
            self._idle += (first, last)
            taken.append(first.elapsed_time(last) / 1000 / num_micro)
        return taken

    def close(self) -> None: ...

    def _mark(self) -> torch.cuda.Event:
        event = self._idle.pop() if self._idle else torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class NoWatch:
    """Where a rank's own time cannot be told from the others'."""

    def start(self) -> None: ...

    def stop(self, num_micro: int) -> None: ...

    def taken(self) -> Sequence[float]:
        return ()

    def close(self) -> None: ...


def stopwatch(device: torch.device, *, is_apart: bool) -> Stopwatch:
    """See [Note: own time]. ``is_apart``: no rank waits for another within forward and backward."""
    if device.type == "cuda":
        return DeviceWatch() if is_apart else NoWatch()
    if is_apart:
        return ClockWatch(time.perf_counter)
    clock = ThreadClock()
    return ClockWatch(clock, clock.close)


class Pace:
    """What one worker tells of its steps."""

    def __init__(self, overseer: Overseer | None, watch: Stopwatch, *, lane: int = 0, is_even: bool = True) -> None:
        """``lane``: ranks of the same one have the same work. ``is_even``: all ranks take micro-batches in turn."""
        self._overseer = overseer or Alone()
        self._watch = watch
        self._lane, self._is_even = lane, is_even
        self._step, self._phase = -1, Phase.START
        self._own: deque[float] = deque(maxlen=_NUM_OWN)
        self._compiler = _Compiler(self)

    def begin(self, step: int) -> None:
        """Step ``step`` is open (the first is 1); until it takes its data, whoever's loop it is may do as it likes."""
        self._step = step
        self.enter(Phase.HOOK)

    def enter(self, phase: Phase) -> None:
        self._phase = phase
        self._overseer.progress(self._step, phase)

    @contextmanager
    def within(self, phase: Phase) -> Iterator[None]:
        """A phase inside another: hooks, a compiler."""
        outer = self._phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(outer)

    def start(self) -> None:
        self.enter(Phase.COMPUTE)
        self._watch.start()

    def tick(self) -> None:
        self._overseer.tick(counts=self._is_even)

    def stop(self, num_micro: int) -> None:
        """All micro-batches are done. What follows before the commit is the loop's own."""
        self._watch.stop(num_micro)
        self.enter(Phase.HOOK)

    def tell(self) -> None:
        for seconds in self._watch.taken():
            self._overseer.own(seconds, self._lane)
            self._own.append(seconds)

    def pop_own(self) -> float:
        """Seconds that a micro-batch usually took this rank alone since this was asked last; 0: none was measured."""
        own, self._own = list(self._own), deque(maxlen=_NUM_OWN)
        return median(own) if own else 0.0

    def close(self) -> None:
        self._compiler.close()
        self._watch.close()


class _Compiler:
    """A compiler that begins in the middle of a run is a phase of its own: a step that takes a minute because of it is
    not one that hangs. Only where it is loaded by now; importing it costs seconds."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._stack: list[Any] = []
        self._handler = sys.modules["torch._dynamo.callback"].callback_handler if _is_loaded() else None
        if self._handler is not None:
            self._handler.register_start_callback(self._begin)
            self._handler.register_end_callback(self._end)

    def _begin(self, *_: object) -> None:
        self._stack.append(inside := self._pace.within(Phase.COMPILE))
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
