"""A run records what it uses: in intervals, without an agent, and its memory by kind as the layouts' formulas say."""

from __future__ import annotations

import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from closeranks import Session
from closeranks.core.errors import UserError
from closeranks.core.events import MemoryUsed, Resources, StepDone, StepPhases
from closeranks.core.phases import switch
from closeranks.facts.layout import Layout
from closeranks.plan.layouts import layout_cost
from closeranks.run.hooks import Hook
from closeranks.run.job.describe import describe_job
from closeranks.run.job.job import Job, load_job
from closeranks.run.loop import run_session
from closeranks.telemetry.reports.report import write_report
from closeranks.testing import run_world
from tests.run.generations import TABLES
from tests.run.small import events, of_kind, open_session, train

NET_BYTES = 4 * (4 * 8 + 8 + 8 * 2 + 2)


class UntilSampled(Hook):
    """Holds the run after its first step until so many events are recorded."""

    def __init__(self, folder: Path, num: int) -> None:
        self._folder, self._num = folder, num

    def on_step(self, session: Session, step: StepDone) -> None:
        deadline = time.monotonic() + 60
        while step.step == 1 and len(of_kind(self._folder, Resources, session.world.rank)) < self._num:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_run_of_one_process_records_its_resources(tmp_path: Path) -> None:
    train(tmp_path, hooks=[UntilSampled(tmp_path, 2)], telemetry={"sample_s": 0.05})
    (first, second, *_) = of_kind(tmp_path, Resources)
    for one in (first, second):
        assert one.process["rss_bytes"] > 1 << 20
        assert one.host_wide["num_cpus"] >= 1
        assert one.seconds > 0
    assert "resource sampler" not in {thread.name for thread in threading.enumerate()}
    text = write_report(tmp_path).read_text()
    assert "## Resources" in text
    assert "| processors, the whole host |" in text
    assert "- Memory: parameters" in text


def test_nothing_is_recorded_if_it_is_turned_off(tmp_path: Path) -> None:
    train(tmp_path, telemetry={"sample_s": 0, "phases": False})
    recorded = {type(one) for one in events(tmp_path)}
    assert not recorded & {Resources, MemoryUsed, StepPhases}
    assert StepDone in recorded
    assert switch("other") == "", "no clock was installed"


def test_a_run_that_failed_leaves_no_thread(tmp_path: Path) -> None:
    class Broken(Hook):
        def on_step(self, session: Session, step: StepDone) -> None:
            if step.step == 2:
                raise ValueError("broken")

    with pytest.raises(UserError, match="broken"):
        run_session(open_session(tmp_path, hooks=[Broken()]))
    assert "resource sampler" not in {thread.name for thread in threading.enumerate()}


def test_memory_is_told_after_the_second_step_and_at_the_end(tmp_path: Path) -> None:
    train(tmp_path)
    early, late = of_kind(tmp_path, MemoryUsed)
    assert (early.step, late.step) == (2, 4)
    assert early.kinds["parameters"] == NET_BYTES
    assert early.kinds["gradients"] >= NET_BYTES
    assert early.kinds["optimizer"] >= 2 * NET_BYTES, "AdamW keeps two tensors of each parameter's size"
    assert "activations" not in early.kinds, "a CPU's allocator does not tell them"
    assert early.peak_bytes > 1 << 20
    assert early.total_bytes > early.peak_bytes


def test_other_state_is_counted_once(tmp_path: Path) -> None:
    train(tmp_path / "plain")
    train(
        tmp_path / "ema", optim={"ema": 0.9}, model=lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    )
    plain, averaged = (of_kind(tmp_path / name, MemoryUsed)[-1].kinds for name in ("plain", "ema"))
    assert averaged["buffers"] - plain["buffers"] == NET_BYTES
    assert averaged["optimizer"] == plain["optimizer"]


def train_sampled(folder: str) -> None:
    train(Path(folder), hooks=[UntilSampled(Path(folder), 1)], telemetry={"sample_s": 0.05})


@pytest.mark.world
def test_the_host_is_reported_by_its_first_rank_alone(tmp_path: Path) -> None:
    run_world(train_sampled, 2, str(tmp_path))
    first, second = (of_kind(tmp_path, Resources, rank)[0] for rank in range(2))
    assert first.host_number == second.host_number == 0
    assert "cpus" in first.host_wide
    assert second.host_wide == {}
    assert second.process["rss_bytes"] > 1 << 20


def job_of(layout: str) -> Job:
    tables: dict[str, Any] = {**TABLES, "layout": asdict(Layout.parse(layout)), "checkpoint": {"save": False}}
    tables["train"] = {**TABLES["train"], "steps": 3, "global_batch": 4}
    return load_job(None, extra=tables).value


def train_layout(folder: str, layout: str) -> None:
    run_session(Session.from_job(job_of(layout), Path(folder)))


@pytest.mark.world
@pytest.mark.parametrize("layout", ["data=2", "data=2 zero=1", "data=2 zero=3", "tensor=2", "pipeline=2"])
def test_every_rank_holds_what_the_formulas_say(tmp_path: Path, layout: str) -> None:
    run_world(train_layout, 2, str(tmp_path), layout)
    cost = layout_cost(describe_job(job_of(layout)), Layout.parse(layout))
    for rank in range(2):
        expected = cost.ranks[rank if "pipeline" in layout else 0].state
        kinds = of_kind(tmp_path, MemoryUsed, rank)[-1].kinds
        assert kinds["parameters"] == expected.parameters + expected.padding
        own = expected.gradients // (2 if "zero=1" in layout else 1)  # only the rank's slices are summed and kept
        assert own <= kinds["gradients"] <= 1.1 * own
        assert kinds["optimizer"] == pytest.approx(expected.optimizer, rel=0.05), "with a counter for each tensor"
