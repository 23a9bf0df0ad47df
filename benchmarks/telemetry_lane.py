"""One rank of ``benchmarks/telemetry.py``: trains a few steps each time it is asked to, and answers what they took.

Reads ``steps N`` and ``spans N`` from its standard input, and answers with a line of JSON after an ``@``. Between turns
it sleeps on that read. Invariant: a turn does what a script under torchrun does; only ``spans`` counts and times the
recorder's own calls, and its steps are not compared with others.
"""

from __future__ import annotations

import gc
import json
import sys
import time
import timeit
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from workload import Workload

from closeranks.core import phases, traffic
from closeranks.run.components.step_phases import PhaseRecorder
from closeranks.run.session import Session
from closeranks.telemetry.config import TelemetryConfig
from closeranks.telemetry.resources.cgroup_usage import read_cgroup
from closeranks.telemetry.resources.host_usage import read_host
from closeranks.telemetry.resources.process_usage import read_process

NUM_RANKS = 2


class Trainer:
    def __init__(self, arguments: dict[str, Any]) -> None:
        folder = Path(arguments["folder"])
        sizes = (arguments["seq_len"], arguments["batch"], NUM_RANKS, arguments["num_steps"], folder)
        job = Workload("small", *sizes, num_layers=arguments["num_layers"]).job
        telemetry = TelemetryConfig(phases=arguments["phases"], sample_s=arguments["sample_s"], report=False)
        tables = {"telemetry": telemetry, "checkpoint": job.checkpoint.model_copy(update={"save": False})}
        self.session = Session.from_job(job.model_copy(update=tables))
        self._steps = iter(self.session)

    def steps(self, num_steps: int) -> dict[str, float]:
        began_at, cpu_before = time.perf_counter(), time.process_time()
        for _ in range(num_steps):
            step = next(self._steps)
            for batch in step:
                step.backward(self.session.loss(batch))
        return {"seconds": time.perf_counter() - began_at, "cpu_seconds": time.process_time() - cpu_before}

    def spans(self, num_steps: int) -> dict[str, float]:
        """Calls of a step, and what one costs: a switch of phases, a count, and the recorder at the step's ends."""
        recorder = self.session.engine.components.get(PhaseRecorder)
        flat = torch.empty(16)
        with counted(recorder) as found:
            self.steps(num_steps)
        return {
            "num_switches": found["switches"] / num_steps,
            "num_counts": found["counts"] / num_steps,
            "record_us": 1e6 * found["record_s"] / num_steps,
            "switch_us": switch_us(),
            "count_us": cost_us(lambda: traffic.count_collective("data", "all-reduce", 2, flat)),
            "look_ms": cost_us(look, number=10) / 1000,
        }


@contextmanager
def counted(recorder: PhaseRecorder, clock_s: Callable[[], float] = time.thread_time) -> Iterator[dict[str, float]]:
    """Counts switches and collectives, and times what the recorder does at the beginning and the end of a step."""
    found: dict[str, float] = {"switches": 0, "counts": 0, "record_s": 0.0}
    clock, count_sent = recorder._clock, traffic.count_sent
    assert clock is not None
    switch, end_step, emit_measured = clock.switch, recorder._end_step, recorder._emit_measured

    def counting_switch(phase: str) -> str:
        found["switches"] += 1
        return switch(phase)

    def counting_count(name: str, num_bytes: int) -> None:
        found["counts"] += 1
        count_sent(name, num_bytes)

    def timed(act: Callable[..., None]) -> Callable[..., None]:
        def acted(*arguments: Any, **options: Any) -> None:
            began_at = clock_s()
            act(*arguments, **options)
            found["record_s"] += clock_s() - began_at

        return acted

    clock.switch = counting_switch  # type: ignore[method-assign]
    traffic.count_sent = counting_count  # called by ``count_collective`` through the module
    recorder._end_step, recorder._emit_measured = timed(end_step), timed(emit_measured)  # type: ignore[method-assign]
    try:
        yield found
    finally:
        clock.switch, traffic.count_sent = switch, count_sent  # type: ignore[method-assign]
        recorder._end_step, recorder._emit_measured = end_step, emit_measured  # type: ignore[method-assign]


def switch_us() -> float:
    """Half of entering and leaving a phase: each of them is a switch."""

    def enter_and_leave() -> None:
        with phases.phase("data.all_reduce"):
            pass

    return cost_us(enter_and_leave) / 2


def look() -> None:
    read_process()
    read_cgroup()
    read_host()


def cost_us(act: Callable[[], object], number: int = 2000) -> float:
    """Processor time, and the fastest of a few series: what others do on the machine meanwhile is not its cost."""
    return 1e6 * min(timeit.repeat(act, number=number, repeat=7, timer=time.thread_time)) / number


class Answers(Protocol):
    def steps(self, num_steps: int) -> dict[str, float]: ...

    def spans(self, num_steps: int) -> dict[str, float]: ...


def answer_requests(trainer: Answers) -> None:
    for line in sys.stdin:
        what, number = line.split()
        answer = trainer.steps(int(number)) if what == "steps" else trainer.spans(int(number))
        gc.collect(0)
        print(f"@{json.dumps(answer)}", flush=True)


if __name__ == "__main__":
    answer_requests(Trainer(json.loads(sys.argv[1])))
