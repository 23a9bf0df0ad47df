"""Measures what reading spends its time on: disk, network, decoding or collating.

Each thread has its own clock: the caller measures, and the code inside names its stages. Invariants: every measured
second is counted once, under the innermost stage; a second outside any stage counts as ``read``; outside a measurement,
entering a stage costs a fraction of a microsecond. Does not import torch.

    with measure() as times:
        batch = source.read(indices)     inside: ``with stage("decode"): ...``
    times.decode_s
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from dataclasses import dataclass
from time import perf_counter
from types import TracebackType

_NAMES = ("read", "fetch", "decode", "collate")


@dataclass(slots=True)
class StageTimes:
    """Seconds by stage, summed over all threads and processes involved."""

    read_s: float = 0.0
    """Finding and reading bytes on this host, and everything outside other stages."""
    fetch_s: float = 0.0
    """Waiting for remote bytes."""
    decode_s: float = 0.0
    """Decoding bytes into values."""
    collate_s: float = 0.0
    """Collating samples into batches."""

    def __add__(self, other: StageTimes) -> StageTimes:
        return StageTimes(
            self.read_s + other.read_s,
            self.fetch_s + other.fetch_s,
            self.decode_s + other.decode_s,
            self.collate_s + other.collate_s,
        )


class _Clock(threading.local):
    """``seconds`` is None while this thread is not being measured."""

    seconds: list[float] | None = None
    slot: int = 0
    since: float = 0.0
    outer: list[int] = []  # noqa: RUF012  replaced, never mutated, before anything is measured

    def turn(self, seconds: list[float], slot: int) -> None:
        """Add the time since the last call to the current stage, and switch to another."""
        now = perf_counter()
        seconds[self.slot] += now - self.since
        self.slot, self.since = slot, now


_CLOCK = _Clock()


class _Stage:
    """Stateless, so that one object serves every thread and every nesting depth."""

    __slots__ = ("_slot",)

    def __init__(self, slot: int) -> None:
        self._slot = slot

    def __enter__(self) -> None:
        clock = _CLOCK
        if clock.seconds is not None:
            clock.outer.append(clock.slot)
            clock.turn(clock.seconds, self._slot)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        clock = _CLOCK
        if clock.seconds is not None and clock.outer:
            clock.turn(clock.seconds, clock.outer.pop())


_STAGES = {name: _Stage(slot) for slot, name in enumerate(_NAMES)}


def stage(name: str) -> AbstractContextManager[None]:
    """Time inside counts as ``read``, ``fetch``, ``decode`` or ``collate``, if this thread is being measured."""
    try:
        return _STAGES[name]
    except KeyError:
        raise ValueError(f"there is no stage '{name}', only {', '.join(_NAMES)}") from None


class measure:
    """Measure this thread; the times are filled in at the end. Seconds of a nested measurement count in both."""

    __slots__ = ("_before", "_outer", "_own", "_slot", "_times")

    def __enter__(self) -> StageTimes:
        clock = _CLOCK
        self._before, self._slot, self._outer = clock.seconds, clock.slot, clock.outer
        if self._before is not None:
            clock.turn(self._before, self._slot)
        self._own = [0.0] * len(_NAMES)
        clock.seconds, clock.slot, clock.since, clock.outer = self._own, 0, perf_counter(), []
        self._times = StageTimes()
        return self._times

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        clock, own, times, before = _CLOCK, self._own, self._times, self._before
        clock.turn(own, self._slot)
        clock.seconds, clock.outer = before, self._outer
        if before is not None:
            before[:] = [mine + inner for mine, inner in zip(before, own, strict=True)]
        times.read_s, times.fetch_s, times.decode_s, times.collate_s = own
