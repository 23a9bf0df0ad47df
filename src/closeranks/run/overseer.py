"""How does a worker talk to whoever started it?

Under our agent there is a link; under torchrun, srun or plain Python there is nobody, and signals are all we hear.
Invariant: training code asks one object, and asking costs microseconds.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from closeranks.agent.link import WorkerLink
from closeranks.agent.stops import is_ignored_hangup
from closeranks.core.events import Event, decode
from closeranks.core.requests import DRAIN, SAVE, Pending, Request
from closeranks.elastic.shelf import Shelf


class Overseer(Protocol):
    has_regrouped: bool
    """Set when this generation ended by agreement, for another to take over."""

    def poll(self) -> frozenset[Request]:
        """What is being asked of this run now; never waits."""
        ...

    def progress(self, step: int, phase: int) -> None:
        """Where this worker stands, readable from outside even after it died."""
        ...

    def tick(self, *, counts: bool = True) -> None:
        """A sign of life: one more micro-batch of the step is done."""
        ...

    def own(self, seconds: float, lane: int = 0) -> None:
        """What a micro-batch cost this worker alone, in a step that is over."""
        ...

    def kept(self, step: int) -> None:
        """A copy of this step's state is sealed in memory."""
        ...

    def send_event(self, event: dict[str, Any]) -> None: ...


class Alone:
    """Nobody started us but a shell or a scheduler: all we hear is signals, once ``listen`` was called."""

    def __init__(self, on_event: Callable[[Event], None] | None = None) -> None:
        self._asked = Pending()
        self.ending = "drained"
        """Who asked: ``drained`` a scheduler, ``interrupted`` Ctrl-C, ``disconnected`` a lost terminal."""
        self._on_event = on_event
        self.has_regrouped = False

    def listen(self) -> None:
        """From now on SIGTERM, SIGHUP and a first SIGINT ask for a drain, and SIGUSR1 for a save.

        Called when training is about to begin: before that there is nothing to save and a signal should end us at
        once, even while torch waits for other ranks, which no Python handler can interrupt.
        """
        for number in _HEARD:
            if not is_ignored_hangup(number):
                signal.signal(number, self._on_signal)
        os.register_at_fork(after_in_child=_be_ordinary)

    def poll(self) -> frozenset[Request]:
        return self._asked.take()

    def progress(self, step: int, phase: int) -> None:
        return None

    def tick(self, *, counts: bool = True) -> None:
        return None

    def own(self, seconds: float, lane: int = 0) -> None:
        return None

    def kept(self, step: int) -> None:
        return None

    def send_event(self, event: dict[str, Any]) -> None:
        known = decode(event)
        if self._on_event is not None and known is not None:
            self._on_event(known)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGUSR1:
            self._asked.add(SAVE)
            return
        self._asked.add(DRAIN)
        if number == signal.SIGHUP:
            self.ending = "disconnected"
        if number == signal.SIGINT:  # whoever presses Ctrl-C again means it
            self.ending = "interrupted"
            signal.signal(number, signal.default_int_handler)


_HEARD = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)


def _be_ordinary() -> None:
    """A process that a worker forks ends by a signal as it would anywhere."""
    for number in _HEARD:
        if not is_ignored_hangup(number):
            signal.signal(number, signal.SIG_DFL)


class _Place:
    """What the worker's entry knows before any session is opened."""

    link: WorkerLink | None = None
    overseer: Overseer | None = None
    shelf: Shelf = Shelf()
    folder: Path | None = None
    """Where whoever started us keeps its logs; the first session that names no folder writes there too."""


def settle_in(
    *,
    link: WorkerLink | None = None,
    overseer: Overseer | None = None,
    folder: Path | None = None,
    shelf: Shelf | None = None,
) -> None:
    """Called once by the worker's entry. ``shelf``: memory that outlives this worker, where no link brings it."""
    _Place.link, _Place.folder = link, folder
    _Place.overseer = overseer or link
    if shelf is None and link is not None:
        shelf = Shelf(tuple(tuple(box) for box in link.boxes), link.world.local_rank)
    _Place.shelf = shelf or Shelf()


def take_shelf() -> Shelf:
    """For the next session of this process; empty where nobody has memory for us."""
    shelf, _Place.shelf = _Place.shelf, replace(_Place.shelf, run=_Place.shelf.run + 1)
    return shelf


def current_link() -> WorkerLink | None:
    return _Place.link


def current_overseer() -> Overseer | None:
    """None in a script that no command of ours started."""
    return _Place.overseer


def take_folder() -> Path | None:
    """The folder we were given, once: a script's second session gets one of its own."""
    folder, _Place.folder = _Place.folder, None
    return folder
