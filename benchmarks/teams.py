"""How do contenders that must not meet take turns? Each is a team of ranks in processes of its own.

A team waits on a pipe, without using a core, until it is told to take some steps. Invariants: one team works at a time;
one that fails is left out with its own words and the others go on; no process outlives its team.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from statistics import mean
from typing import Any

import torch.distributed as dist
from contenders import Contender
from workload import logged_losses

from closeranks.testing.world import WorldError, run_world

Maker = Callable[..., Contender]


class TeamError(Exception):
    """A team could not be opened, or broke off in its turn; the text is what its first failing rank said last."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What all ranks of a team measured."""

    seconds: float
    """Of the slowest rank."""
    cpu_seconds: float
    """Of a rank, in the mean: what other programs do on the machine does not add to it."""


class Team:
    """Call sequence: the constructor returns when all ranks are ready; ``take`` for each turn; ``close``."""

    def __init__(self, num_ranks: int, timeout_s: float, make: Maker, *args: Any) -> None:
        pipes = [Pipe() for _ in range(num_ranks)]
        self._ends = [ours for ours, _ in pipes]
        self._exit_reader, self._exit_writer = Pipe(duplex=False)
        self._results: list[list[float]] = []
        self._words = ""
        theirs = [end for _, end in pipes]
        self._thread = threading.Thread(target=self._run, args=(num_ranks, timeout_s, (make, args, theirs)))
        self._thread.start()
        self._receive()

    def take(self, num_steps: int) -> Turn:
        self._send_num_steps(num_steps)
        received = self._receive()
        return Turn(max(wall for wall, _ in received), mean(cpu for _, cpu in received))

    def close(self) -> list[float]:
        """The losses that rank 0 logged; empty when the team failed."""
        if self._thread.is_alive():
            self._send_num_steps(0)
        self._thread.join()
        for end in (*self._ends, self._exit_reader):
            end.close()
        return self._results[0] if self._results else []

    def _run(self, num_ranks: int, timeout_s: float, args: tuple[Any, ...]) -> None:
        try:
            self._results = run_world(_run_rank, num_ranks, *args, timeout_s=timeout_s)
        except WorldError as error:
            self._words = last_words(error)
        finally:
            for end in args[-1]:
                end.close()
            self._exit_writer.close()

    def _send_num_steps(self, num_steps: int) -> None:
        for end in self._ends:
            end.send(num_steps)

    def _receive(self) -> list[Any]:
        """One message of every rank; the bell rings when there will be none."""
        received: list[Any] = []
        for end in self._ends:
            try:
                wait([end, self._exit_reader])
                received.append(end.recv() if end.poll() else self._exit_reader.recv())
            except EOFError:
                self._thread.join()
                raise TeamError(self._words or "it ended before its turn") from None
        return received


def last_words(error: WorldError) -> str:
    """The last line of what the culprit told: an exception's message, or how the process died."""
    culprit = error.failures[0]
    lines = [line.strip() for line in culprit.detail.splitlines() if line.strip()]
    # A stack is told innermost call last by an exception, and first by a rank that hangs.
    line = lines[-1] if culprit.kind != "hung" else " ".join(lines[:2])
    return f"rank {culprit.rank} {culprit.kind}: {line}"


def _run_rank(make: Maker, args: tuple[Any, ...], ends: Sequence[Connection]) -> list[float]:
    # torch renamed two collectives in 2.13; both names stand in the range we support, and each call would say so.
    warnings.filterwarnings("ignore", category=FutureWarning)
    end = ends[dist.get_rank()]
    contender = make(*args)
    end.send("ready")
    while num_steps := end.recv():
        dist.barrier()
        began_at, cpu_before = time.perf_counter(), time.process_time()
        contender.take_steps(num_steps)
        end.send((time.perf_counter() - began_at, time.process_time() - cpu_before))
    contender.close()
    return logged_losses(contender.log_path) if dist.get_rank() == 0 else []
