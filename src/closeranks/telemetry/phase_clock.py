"""Clocks that attribute the time of each step to phases (``core.phases``), on a CPU and on an accelerator.

On an accelerator a switch records an event on the compute stream; the times between events are read when the device has
passed them, so the host never waits. What they measure is the device's time: a phase in which only the host was busy
takes no time there, unless the device ran out of work meanwhile, and then it counts as much as it delayed the device.

Invariant: the phases of a step add up to the time from its beginning to that of the next, whatever happens in between.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from closeranks.core.phases import OTHER, PhaseClock
from closeranks.core.system.environment import is_nvtx_tool_attached

Seconds = dict[str, float]


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """Where the time of one step went, in seconds."""

    step: int
    phases: Seconds


class StepPhaseClock(PhaseClock, Protocol):
    def end_step(self, step: int) -> None:
        """Everything since the last call belongs to ``step``."""
        ...

    def pop(self, *, wait: bool = False) -> Iterator[MeasuredStep]:
        """The steps that are measured by now, or all that have ended. ``wait``: sync point."""
        ...

    def close(self) -> None: ...


class HostPhaseClock:
    def __init__(self, clock_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self._clock_ns = clock_ns
        self._phase, self._since_ns = OTHER, clock_ns()
        self._spent_ns: dict[str, int] = {}
        self._ended: deque[MeasuredStep] = deque()

    def switch(self, phase: str) -> str:
        now_ns, outer, spent_ns = self._clock_ns(), self._phase, self._spent_ns
        spent_ns[outer] = spent_ns.get(outer, 0) + now_ns - self._since_ns
        self._phase, self._since_ns = phase, now_ns
        return outer

    def end_step(self, step: int) -> None:
        self.switch(self._phase)
        self._ended.append(MeasuredStep(step, {name: spent_ns / 1e9 for name, spent_ns in self._spent_ns.items()}))
        self._spent_ns = {}

    def pop(self, *, wait: bool = False) -> Iterator[MeasuredStep]:
        while self._ended:
            yield self._ended.popleft()

    def close(self) -> None: ...


_Mark = tuple[str, torch.cuda.Event]
"""A phase and the event at which it began."""


class CudaPhaseClock:
    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)
        self._idle: list[torch.cuda.Event] = []
        self._marks: list[_Mark] = []
        self._ended: deque[tuple[int, Sequence[_Mark], torch.cuda.Event]] = deque()
        self.switch(OTHER)

    def switch(self, phase: str) -> str:
        event = self._idle.pop() if self._idle else torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        self._marks.append((phase, event))
        return self._marks[-2][0] if len(self._marks) > 1 else OTHER

    def end_step(self, step: int) -> None:
        self.switch(phase := self._marks[-1][0])
        *marks, (_, end) = self._marks
        self._ended.append((step, marks, end))
        self._marks = [(phase, end)]

    def pop(self, *, wait: bool = False) -> Iterator[MeasuredStep]:
        while self._ended and (wait or self._ended[0][2].query()):
            step, marks, end = self._ended.popleft()
            if wait:
                end.synchronize()
            yield MeasuredStep(step, _between(marks, end))
            self._idle += (event for _, event in marks)  # ``end`` is also the first mark of the next step

    def close(self) -> None: ...


def _between(marks: Sequence[_Mark], end: torch.cuda.Event) -> Seconds:
    spent: Seconds = {}
    ends = [*(event for _, event in marks[1:]), end]
    for (name, begin), until in zip(marks, ends, strict=True):
        spent[name] = spent.get(name, 0.0) + begin.elapsed_time(until) / 1000
    return spent


class NvtxPhaseClock:
    """Marks the phases that another clock measures as NVTX ranges of the same names. Ranges have handles, unlike those
    that are pushed and popped: a phase may begin on a thread of autograd and end on the main one."""

    def __init__(
        self,
        clock: StepPhaseClock,
        start: Callable[[str], int] = torch.cuda.nvtx.range_start,
        end: Callable[[int], object] = torch.cuda.nvtx.range_end,
    ) -> None:
        self._clock, self._start, self._end = clock, start, end
        self.end_step, self.pop = clock.end_step, clock.pop
        self._range = start(OTHER)

    def switch(self, phase: str) -> str:
        self._end(self._range)
        self._range = self._start(phase)
        return self._clock.switch(phase)

    def close(self) -> None:
        self._end(self._range)
        self._clock.close()


def make_phase_clock(device: torch.device, nvtx: bool | Literal["auto"] = False) -> StepPhaseClock:
    """``nvtx``: "auto" marks NVTX ranges if a tool that reads them is attached; never on a CPU."""
    if device.type != "cuda":
        return HostPhaseClock()
    clock = CudaPhaseClock(device)
    wanted = is_nvtx_tool_attached() if nvtx == "auto" else nvtx
    return NvtxPhaseClock(clock) if wanted else clock
