"""On a device, the phases that events measured agree with a profiler's trace."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections import defaultdict
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
from torch.profiler import ProfilerActivity, profile, record_function

from closeranks import Session
from closeranks.core import phases
from closeranks.core.events import StepPhases
from closeranks.core.phases import PhaseClock
from closeranks.run.job.job import load_job
from tests.run.small import events

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[3]
NUM_STEPS, FIRST, LAST = 14, 6, 12
"""Steps ``FIRST`` to ``LAST`` are compared."""
MARK = "phase:"
SHAPE = ("model.dim=2048", "model.num_layers=6", "model.num_heads=16", "model.num_kv_heads=16", "data.seq_len=1024")
BATCH = ("train.global_batch=8", "train.micro_batch=4", "train.precision=bf16", f"train.steps={NUM_STEPS}")
QUIET = ("train.eval_every=0", "train.eval_samples=4", "checkpoint.save=false", "telemetry.report=false")


class Marking:
    """Passes every switch on, and marks it in the trace."""

    def __init__(self, clock: PhaseClock) -> None:
        self._clock = clock

    def switch(self, phase: str) -> str:
        with record_function(f"{MARK}{phase}"):
            return self._clock.switch(phase)


def test_phases_agree_with_a_profilers_trace(tmp_path: Path) -> None:
    job = load_job(ROOT / "examples" / "tiny.toml", [*SHAPE, *BATCH, *QUIET]).value
    session = Session.from_job(job, tmp_path)
    trace = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True)
    with session:
        for number, step in enumerate(session, start=1):
            if number == FIRST - 2:
                trace.start()
                assert phases._clock is not None
                phases.install_clock(Marking(phases._clock))
            step.run()
    trace.stop()
    trace.export_chrome_trace(str(tmp_path / "trace.json"))
    measured = {one.step: one for one in events(tmp_path) if isinstance(one, StepPhases)}
    total: dict[str, float] = defaultdict(float)
    for step in range(FIRST, LAST + 1):
        for name, spent in measured[step].phases.items():
            total[name] += spent
    traced = phases_in(json.loads((tmp_path / "trace.json").read_text())["traceEvents"])
    in_trace = {name: traced.get(name, 0.0) for name in total}
    whole = sum(total.values())
    assert sum(in_trace.values()) == pytest.approx(whole, rel=0.03), (dict(total), in_trace)
    shown = [name for name, spent in total.items() if spent > 0.05 * whole]
    assert {"forward", "backward"} <= set(shown)
    for name in shown:
        assert in_trace[name] == pytest.approx(total[name], rel=0.03), (name, dict(total), in_trace)


def phases_in(trace: list[dict[str, Any]]) -> dict[str, float]:
    """Seconds by phase in the compared steps, by the profiler's own clock.

    A phase begins on the device when all kernels that were launched before it have ended.
    """
    launched = sorted(
        (one["ts"], one["args"]["correlation"])
        for one in trace
        if one.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in one.get("args", {})
    )
    ends = {
        one["args"]["correlation"]: one["ts"] + one["dur"]
        for one in trace
        if one.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    }
    times = [at for at, _ in launched]
    last_end = list(accumulate((ends.get(number, 0.0) for _, number in launched), max))
    marks = sorted(
        (one["ts"], one["name"].removeprefix(MARK))
        for one in trace
        if one.get("cat") == "user_annotation" and one["name"].startswith(MARK)
    )
    steps = step_starts([name for _, name in marks])
    spent: dict[str, float] = defaultdict(float)
    begins = []
    for at, name in marks:
        before = bisect_left(times, at)
        begins.append((max(at, last_end[before - 1] if before else 0.0), name))
    for (begin, name), (end, _) in pairwise(begins[steps[0] : steps[1] + 1]):
        spent[name] += (end - begin) / 1e6
    return spent


def step_starts(names: list[str]) -> tuple[int, int]:
    """The marks at which the first compared step begins, and at which the step after the last one does.

    Each step has one vote; it ends with the mark after which the loop is the user's again (the beginning of a step).
    """
    votes = [number for number, name in enumerate(names) if name == phases.VOTE]
    begin = [next((n for n in range(vote, len(names)) if names[n] == phases.USER_CODE), -1) for vote in votes]
    first = FIRST - (FIRST - 2) - 1  # the trace starts within step FIRST - 2: its vote is the first
    return begin[first], begin[first + LAST - FIRST + 1]
