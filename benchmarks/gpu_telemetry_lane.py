"""The rank of ``benchmarks/gpu_telemetry.py``: as that of ``telemetry_lane``, on a GPU.

Invariant: a turn ends when the device has finished its steps.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from random_tokens import RandomTokens
from telemetry_lane import answer_requests, cost_us, counted, switch_us

from closeranks.facts.shapes.llama import PRESETS
from closeranks.run.components.step_phases import PhaseRecorder
from closeranks.run.job.job import load_job
from closeranks.run.session import Session
from closeranks.telemetry.device import device_uuid
from closeranks.telemetry.resources.cgroup_usage import read_cgroup
from closeranks.telemetry.resources.gpu_usage import GpuUsage
from closeranks.telemetry.resources.host_usage import read_host
from closeranks.telemetry.resources.process_usage import read_process


class Trainer:
    def __init__(self, arguments: dict[str, Any]) -> None:
        tokens = {"seq_len": arguments["seq_len"], "vocab_size": PRESETS[arguments["preset"]].vocab_size}
        tables: dict[str, Any] = {
            "run": {"folder": str(Path(arguments["folder"]) / "run"), "seed": 7},
            "model": {"name": "llama", "preset": arguments["preset"]},
            "data": {"name": f"{RandomTokens.__module__}:RandomTokens", "args": tokens, "seq_len": tokens["seq_len"]},
            "train": {
                "steps": arguments["num_steps"],
                "global_batch": arguments["batch"],
                "micro_batch": arguments["batch"],
                "precision": "bf16",
                "compile": arguments["compile"],
            },
            "optim": {"lr": 3e-4, "clip": 1.0},
            "telemetry": {"phases": arguments["phases"], "sample_s": arguments["sample_s"], "report": False},
            "checkpoint": {"save": False},
        }
        self.session = Session.from_job(load_job(None, extra=tables).value)
        self._steps = iter(self.session)

    def steps(self, num_steps: int) -> dict[str, float]:
        torch.cuda.synchronize()
        began_at, cpu_before = time.perf_counter(), time.process_time()
        for _ in range(num_steps):
            step = next(self._steps)
            for batch in step:
                step.backward(self.session.loss(batch))
        torch.cuda.synchronize()
        return {"seconds": time.perf_counter() - began_at, "cpu_seconds": time.process_time() - cpu_before}

    def spans(self, num_steps: int) -> dict[str, float]:
        """Calls of a step, and what one costs."""
        with counted(self.session.engine.components.get(PhaseRecorder), time.perf_counter) as found:
            self.steps(num_steps)
        return {
            "num_switches": found["switches"] / num_steps,
            "record_us": 1e6 * found["record_s"] / num_steps,
            "switch_us": switch_us(),
            "look_ms": cost_us(_look(), number=10) / 1000,
        }


def _look() -> Callable[[], None]:
    gpu = GpuUsage(device_uuid(torch.device("cuda", torch.cuda.current_device())))
    gpu.open()

    def look() -> None:
        read_process()
        read_cgroup()
        read_host()
        gpu.read()

    return look


if __name__ == "__main__":
    answer_requests(Trainer(json.loads(sys.argv[1])))
