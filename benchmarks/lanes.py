"""How are the loops on one GPU timed? In turns of a few steps each, told as they end.

Invariant: the device has finished all work of a turn before the clock is read, and what a loop holds between its turns
is not counted against the other's peak.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from breakdown import break_down
from gpu_loops import Loop
from results import say

PROFILED_STEPS = 3


@dataclass(slots=True)
class Lane:
    """One loop and what was measured of it."""

    loop: Loop
    resident_bytes: int
    """What it holds between its turns."""
    seconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0


class Lanes:
    """Opens loops one by one, lets them take turns, and tells each turn as it ends."""

    def __init__(self, device: torch.device, *, num_steps: int, tokens_per_step: int) -> None:
        self._device = device
        self._num_steps = num_steps
        self._tokens = tokens_per_step * num_steps
        self.lanes: dict[str, Lane] = {}

    def open(self, makers: Mapping[str, Callable[[], Loop]], num_warmup: int) -> None:
        for name, make in makers.items():
            before, began_at = self._allocated(), time.perf_counter()
            try:
                loop = make()
                loop.take_steps(num_warmup)
            except torch.OutOfMemoryError as error:
                if not self.lanes:
                    raise
                say(f"  {name}: left out, no memory for it beside the others ({str(error).splitlines()[0]})")
                continue
            self._wait()
            self.lanes[name] = Lane(loop, self._allocated() - before)
            say(f"  {name}: ready after {time.perf_counter() - began_at:.1f} s, {num_warmup} steps among them")

    def take_rounds(self, num_rounds: int) -> None:
        for number in range(num_rounds):
            lanes = list(self.lanes.items())
            for name, lane in lanes if number % 2 == 0 else reversed(lanes):
                self._take_turn(lane)
                say(f"  round {number + 1}: {name:<10} {self._tokens / lane.seconds[-1]:>10,.0f} tokens/s")

    def speeds(self, lane: Lane) -> list[float]:
        """Tokens per second, turn by turn."""
        return [self._tokens / seconds for seconds in lane.seconds]

    def profiles(self) -> dict[str, dict[str, float]]:
        """Milliseconds a step by kind of kernel, for each loop."""
        found = {}
        for name, lane in self.lanes.items():
            kinds, top = break_down(lane.loop.take_steps, self._wait, PROFILED_STEPS)
            found[name] = kinds
            say(f"  {name}, ms a step: " + ", ".join(f"{kind} {ms:g}" for kind, ms in kinds.items()))
            for line in top:
                say(f"    {line}")
        return found

    def close(self) -> None:
        for lane in self.lanes.values():
            lane.loop.close()
        self.lanes.clear()
        gc.collect()

    def _take_turn(self, lane: Lane) -> None:
        others = self._allocated() - lane.resident_bytes
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        self._wait()
        began_at = time.perf_counter()
        lane.loop.take_steps(self._num_steps)
        self._wait()
        lane.seconds.append(time.perf_counter() - began_at)
        if self._device.type == "cuda":
            lane.peak_bytes = max(lane.peak_bytes, torch.cuda.max_memory_allocated(self._device) - others)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated(self._device) if self._device.type == "cuda" else 0
