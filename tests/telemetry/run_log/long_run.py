"""Writes long runs quickly, and recorded ones with small blocks, so that reading through an index can be tested."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from closeranks.core.events import Evaluated, MemoryUsed, Resources, RunEnded, RunStarted, Saved, StepPhases, Warned
from closeranks.telemetry.run_log import step_blocks, step_reader
from closeranks.telemetry.run_log.recorder import EventRecorder, parse_line, to_line
from closeranks.telemetry.run_log.run_folder import RunFolder
from closeranks.telemetry.run_log.step_blocks import BlockBuilder, to_index_line
from tests.telemetry.conftest import CPU, step

PHASES = {"forward": 0.04, "backward": 0.05, "data.all_reduce": 0.006, "data": 0.004}


def small_blocks(monkeypatch: pytest.MonkeyPatch, whole_bytes: int = 0) -> None:
    """Blocks of 16 steps; metrics of more than ``whole_bytes`` are read through their index."""
    for module in (step_blocks, step_reader):
        monkeypatch.setattr(module, "STEPS", 16)
    monkeypatch.setattr(step_blocks, "LEAD_STEPS", 4)
    monkeypatch.setattr(step_reader, "WHOLE_BYTES", whole_bytes)
    monkeypatch.setattr(step_reader, "OTHER_SAMPLES", 2)
    monkeypatch.setattr(step_reader, "SAMPLES", 4)


def record_session(folder: Path, first: int, last: int, generation: int = 0, *, is_killed: bool = False) -> None:
    """Steps ``first`` to ``last`` of rank 0, with an evaluation every 50 and a step in 37 that is skipped."""
    recorder = EventRecorder(folder, 0)
    recorder.emit(replace(CPU, first_step=first - 1, generation=generation))
    for number in range(first, last + 1):
        recorder.emit(step(number, taken=number % 37 != 0, loss=2.0 + generation + number / 1000, num_bad=1))
        recorder.emit(StepPhases(number, 0.1, PHASES))
        if number % 50 == 0:
            recorder.emit(Evaluated(number, loss=1.0 + number))
            recorder.emit(Saved(number, f"step-{number}"))
        if number % 60 == 0:
            recorder.emit(Warned("the disk is slow", step=number))
        if number % 5 == 0:
            recorder.emit(Resources(5.0, process={"cpus": 1.0}, gpu={"energy_j": 10.0}))
    if is_killed:
        recorder._file.close()  # and nothing else: as SIGKILL leaves it
        return
    recorder.emit(MemoryUsed(last, {"parameters": 100}))
    recorder.emit(RunEnded(last, seconds=1.0))
    recorder.close()


def write_rank(folder: Path, rank: int, num_steps: int, num_ranks: int = 1, *, has_index: bool = True) -> None:
    """A rank's metrics as a recorder writes them, at a tenth of the time, with short lines."""
    run = RunFolder(folder)
    run.metrics(rank).parent.mkdir(parents=True, exist_ok=True)
    builder = BlockBuilder(0)
    with run.metrics(rank).open("wb") as metrics, run.index(rank).open("wb") as index:
        for at, event, line in _lines(rank, num_steps, num_ranks):
            metrics.write(line)
            if (block := builder.add(event, at, line)) is not None:
                index.write(to_index_line(block))
        if (block := builder.finish()) is not None:
            index.write(to_index_line(block))
    if not has_index:
        run.index(rank).unlink()


def _lines(rank: int, num_steps: int, num_ranks: int) -> Iterator[tuple[float, object, bytes]]:
    common = {"at": 1000.0, "rank": rank}
    started = RunStarted(rank, num_ranks, last_step=num_steps, num_params=10**9, flops_per_item=6e9)
    fields = {name: getattr(started, name) for name in ("world_size", "last_step", "num_params", "flops_per_item")}
    yield 1000.0, started, to_line({"event": "run_started", **common, **fields})
    spent = {name: seconds * (1.2 if rank == 3 else 1.0) for name, seconds in PHASES.items()}
    phases = to_line({"seconds": sum(spent.values()), "phases": spent})[1:]
    for number in range(1, num_steps + 1):
        at = 1000.0 + number / 10
        done = step(number, loss=2.0 + 4 * 1000 / (1000 + number) + 0.1 * (number % 7))
        figures = b'"loss": %.4f, "grad_norm": 1.0, "lr": 0.001, "items": 1000, "seconds": %g, "memory_bytes": %d}\n'
        values = (done.loss, done.seconds, done.memory_bytes)
        head = b'"at": %.1f, "rank": %d, "step": %d, ' % (at, rank, number)
        yield at, done, b'{"event": "step", ' + head + figures % values
        yield at, StepPhases(number, 0.1, spent), b'{"event": "phases", ' + head + phases
        if number % 10_000 == 0:
            evaluated = Evaluated(number, loss=2.0)
            yield at, evaluated, to_line({"event": "eval", **common, "step": number, "loss": 2.0})
    ended = RunEnded(num_steps, seconds=num_steps / 10)
    yield at, ended, to_line({"event": "run_ended", **common, "at": at, "step": num_steps, "seconds": num_steps / 10})


def lines_at(path: Path, offsets: list[int]) -> list[str]:
    """The names of the events at the offsets that a block lists."""
    data = path.read_bytes()
    pairs = zip(offsets[::2], offsets[1::2], strict=True)
    lines = (line for begin, end in pairs for line in data[begin:end].splitlines())
    return [str((parse_line(line) or {}).get("event")) for line in lines]
