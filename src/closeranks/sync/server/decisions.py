"""Whose pushes does a step take? What the lead server tells every other rank, and how workers hear of it.

[Note: late pushes] With backup workers the lead server, the first one, decides for each step: it takes the pushes of
the first workers whose push is complete, and tells all ranks whose these were and how many pushes of each worker it has
seen. A worker pushes at most once in a step, and not at all if the step was decided before it was done. So the count
says which pushes a server has to expect, and that all but the last of them, and the last if it was not taken, are
dropped. Invariant: all servers add the same pushes, in the order of the workers' ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import NamedTuple

import torch
from torch import Tensor


class Expected(NamedTuple):
    """Whose pushes a step can take, and how many of them it waits for."""

    workers: tuple[int, ...]
    num_needed: int


@dataclass(frozen=True, slots=True)
class Decision:
    step: int
    taken: tuple[int, ...]
    """Workers, in the order of their ranks."""
    num_seen: tuple[int, ...]
    """By worker: its pushes that the lead server has seen in this generation."""

    def encode(self) -> Tensor:
        flags = [int(worker in self.taken) for worker in range(len(self.num_seen))]
        return torch.tensor([self.step, *flags, *self.num_seen], dtype=torch.int64)

    @classmethod
    def decode(cls, tensor: Tensor) -> Decision:
        step, *rest = tensor.tolist()
        flags, num_seen = rest[: len(rest) // 2], rest[len(rest) // 2 :]
        return cls(step, tuple(worker for worker, flag in enumerate(flags) if flag), tuple(num_seen))


class DecisionReceiver:
    """Receives the decisions on a worker, while it computes, so that it can leave off what nobody waits for.

    Call sequence, on the main thread: ``expect`` at the beginning of each interval between synchronizations, ``newest``
    at any time, ``wait`` in each step. ``receive()`` waits for the next decision."""

    def __init__(self, receive: Callable[[], Decision]) -> None:
        self._receive = receive
        self._expected: SimpleQueue[int] = SimpleQueue()
        self._changed = threading.Condition()
        self._decisions: dict[int, Decision] = {}
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        self.newest = -1
        """The last step that was decided."""

    def expect(self, num_steps: int) -> None:
        """So many more decisions will be sent."""
        self._expected.put(num_steps)
        if self._thread is None:
            # A daemon: a process whose servers are gone must be able to exit.
            self._thread = threading.Thread(target=self._run, name="decision receiver", daemon=True)
            self._thread.start()

    def wait(self, step: int) -> Decision:
        with self._changed:
            self._changed.wait_for(lambda: self.newest >= step or self._failure is not None)
            if self._failure is not None:
                raise self._failure
            return self._decisions.pop(step)

    def _run(self) -> None:
        try:
            while True:
                for _ in range(self._expected.get()):
                    decision = self._receive()
                    with self._changed:
                        self._decisions[decision.step] = decision
                        self.newest = decision.step
                        self._changed.notify()
        except BaseException as error:
            with self._changed:
                self._failure = error
                self._changed.notify()
