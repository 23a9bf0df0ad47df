"""A synthetic run, so that what reads run folders can be tried without training."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from closeranks.core.events import Evaluated, RunEnded, RunStarted, Saved, StepDone
from closeranks.telemetry.run_log.recorder import EventRecorder

CPU = RunStarted(
    world_size=2,
    last_step=40,
    device="Intel Xeon Processor",
    num_params=1_204_224,
    num_trainable=1_204_224,
    flops_per_item=7.5e6,
    measured_flops=1.25e12,
    versions={"torch": "2.13.0", "python": "3.11.7"},
)


def step(number: int, **changes: object) -> StepDone:
    """A step of 1000 items in a tenth of a second (2 s for the first), with a falling loss."""
    values: dict[str, object] = {
        "step": number,
        "loss": 1.5 + 4 * math.exp(-number / 10),
        "grad_norm": 1.0,
        "lr": 1e-3,
        "items": 1000,
        "seconds": 2.0 if number == 1 else 0.1,
        "data_wait_s": 0.001,
        "memory_bytes": 1 << 30,
    }
    return StepDone(**{**values, **changes})  # type: ignore[arg-type]


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    def make(started: RunStarted = CPU, *, num_steps: int = 40, reason: str = "finished", name: str = "demo") -> Path:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"run": {"name": name}, "model": {"name": "llama"}}))
        recorder = EventRecorder(folder, 0)
        recorder.emit(started)
        for number in range(1, num_steps + 1):
            recorder.emit(step(number))
            if number % 20 == 0:
                recorder.emit(Evaluated(step=number, loss=1.6, metrics={"accuracy": 0.9612}, seconds=0.5))
        if reason == "finished":
            state = folder / "checkpoints" / f"step-{num_steps:08d}"
            state.mkdir(parents=True)
            recorder.emit(Saved(step=num_steps, path=str(state), bytes=5, seconds=0.1))
        if reason:
            recorder.emit(RunEnded(step=num_steps, reason=reason, seconds=31.2))
        recorder.close()
        return folder

    return make
