"""Where the time of a step went: what is slowed on purpose shows in its own phase, and phases add up."""

from __future__ import annotations

import gc
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn
from torch.utils.data import Dataset

from closeranks import Session
from closeranks.core.events import Evaluated, StepDone, StepPhases
from closeranks.core.phases import install_clock, phase
from closeranks.facts.layout import Layout
from closeranks.run.hooks import Hook
from closeranks.run.job.job import load_job
from closeranks.run.loop import run_session
from closeranks.telemetry.phase_clock import HostPhaseClock
from closeranks.testing import run_world
from tests.cost import python_calls
from tests.run.generations import TABLES
from tests.run.small import dataset, events, net, open_session

SLOW_S = 0.05


class SlowData(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self) -> None:
        self._samples = dataset()

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        time.sleep(SLOW_S / 8)
        return self._samples[index]


class SlowLayer(nn.Module):
    def __init__(self, *, in_backward: bool) -> None:
        super().__init__()
        self._in_backward = in_backward

    def forward(self, hidden: Tensor) -> Tensor:
        if not self._in_backward:
            time.sleep(SLOW_S / 2)
            return hidden
        hidden.register_hook(lambda gradient: time.sleep(SLOW_S / 2))
        return hidden


class SlowHook(Hook):
    def __init__(self, seconds: float = 0.0, eval_seconds: float = 0.0) -> None:
        self._seconds, self._eval_seconds = seconds, eval_seconds

    def on_step(self, session: Session, step: StepDone) -> None:
        time.sleep(self._seconds)

    def on_eval(self, session: Session, result: Evaluated) -> None:
        time.sleep(self._eval_seconds)


class CollectingHook(Hook):
    """Collects garbage after the second step, as a loop of the user's might."""

    def on_step(self, session: Session, step: StepDone) -> None:
        if step.step == 2:
            gc.collect()


def recorded(folder: Path, rank: int = 0) -> list[StepPhases]:
    return [one for one in events(folder, rank) if isinstance(one, StepPhases)]


SLOWED: dict[str, dict[str, Any]] = {
    "data": {"data": SlowData(), "loading": {"prefetch": 0}},
    "forward": {"model": lambda: nn.Sequential(net(), SlowLayer(in_backward=False))},
    "backward": {"model": lambda: nn.Sequential(net(), SlowLayer(in_backward=True))},
    "user_code": {"hooks": [SlowHook(SLOW_S)]},
}


@pytest.mark.parametrize("slowed", SLOWED)
def test_what_is_slow_shows_in_its_phase(tmp_path: Path, slowed: str) -> None:
    began = time.perf_counter()
    run_session(open_session(tmp_path, **SLOWED[slowed]))
    elapsed = time.perf_counter() - began
    steps = recorded(tmp_path)
    assert [one.step for one in steps] == [1, 2, 3, 4]
    for one in steps[1:-1]:  # the first warms up, and the hook of the last may come after the last measurement
        assert max(one.phases, key=one.phases.__getitem__) == slowed, one
        assert one.phases[slowed] >= SLOW_S
        assert sum(one.phases.values()) == pytest.approx(one.seconds, abs=1e-5)
    assert sum(one.seconds for one in steps) < elapsed


def test_evaluation_and_save_are_phases_of_the_step_before_them(tmp_path: Path) -> None:
    tables = {"train": {"steps": 4, "eval_every": 2}, "checkpoint": {"every": 2}}
    run_session(open_session(tmp_path, eval_data=dataset(32, seed=9), **tables))
    by_step = {one.step: one.phases for one in recorded(tmp_path)}
    assert {step for step, phases in by_step.items() if phases.get("evaluation")} == {2, 4}
    assert all(phases[name] > 0 for phases in by_step.values() for name in ("forward", "backward", "optimizer", "vote"))


def test_garbage_collection_is_a_phase_whoever_asked_for_it(tmp_path: Path) -> None:
    num_callbacks = len(gc.callbacks)
    run_session(open_session(tmp_path, hooks=[CollectingHook()]))
    collected = {one.step: one.phases.get("gc", 0.0) for one in recorded(tmp_path)}
    assert {step for step, seconds in collected.items() if seconds} == {2}
    assert len(gc.callbacks) == num_callbacks


def train_layout(folder: str, layout: str) -> None:
    tables = {**TABLES, "layout": asdict(Layout.parse(layout)), "checkpoint": {"save": False}}
    tables["train"] = {**TABLES["train"], "steps": 3, "global_batch": 4}
    run_session(Session.from_job(load_job(None, extra=tables).value, Path(folder)))


WAITS = {
    "data=2": {"data.all_reduce"},
    "data=2 zero=1": {"data.reduce_scatter", "data.all_gather"},
    "data=2 zero=3": {"data.reduce_scatter", "data.all_gather"},
    "tensor=2": {"tensor.all_gather", "tensor.reduce_scatter"},
    "pipeline=2": {"pipeline.receive", "pipeline.send"},
}


@pytest.mark.world
@pytest.mark.parametrize("layout", WAITS)
def test_waiting_for_collectives_is_told_by_axis_and_kind(tmp_path: Path, layout: str) -> None:
    run_world(train_layout, 2, str(tmp_path), layout)
    for rank in range(2):
        steps = recorded(tmp_path, rank)
        assert [one.step for one in steps] == [1, 2, 3]
        waits = {name for one in steps for name in one.phases if "." in name}
        assert waits >= WAITS[layout], waits


def test_measuring_costs_little() -> None:
    """Some 30 phases in a step, at 1 us each, are 0.3% of a step of 10 ms."""
    install_clock(HostPhaseClock())
    try:
        cost = python_calls(lambda: phase("data.all_reduce").__enter__(), number=200)
    finally:
        install_clock(None)
    assert cost < 50, "some 10"
