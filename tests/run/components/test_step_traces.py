"""Traces that are asked for while a run trains: the right steps of all ranks, on one clock, and not a bit changed."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from closeranks import Hook, Session
from closeranks.core.events import StepDone, StepPhases, Warned
from closeranks.facts.layout import Layout
from closeranks.run.job.job import load_job
from closeranks.run.loop import run_session
from closeranks.telemetry.run_log.run_folder import RunFolder
from closeranks.telemetry.traces.clock_offsets import CONVERSION_NS
from closeranks.telemetry.traces.merge import merge_traces
from closeranks.telemetry.traces.rank_trace import RankTrace, read_rank_trace
from closeranks.telemetry.traces.trace_mailbox import TraceAnswer, TraceMailbox, TraceRequest
from closeranks.telemetry.traces.trace_summary import summarize_rank
from closeranks.testing import run_world
from tests.cost import python_calls
from tests.run.generations import TABLES
from tests.run.small import of_kind, open_session

NUM_STEPS = 8


class Ask(Hook):
    """Leaves a request after step 1; rank 0 looks for it before every vote."""

    def __init__(self, request: TraceRequest, after: int = 1) -> None:
        self._request, self._after = request, after

    def on_step(self, session: Session, step: StepDone) -> None:
        if session.world.is_lead and step.step == self._after:
            RunFolder(session.folder).traces.mkdir(exist_ok=True)
            TraceMailbox(session.folder).post(self._request)


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("closeranks.run.components.step_traces._LOOK_S", 0.0)


def traces(folder: Path) -> dict[int, Path]:
    return {int(path.name[5:10]): path for path in sorted(folder.glob("traces/step-*/rank-*.json.gz"))}


def losses(folder: Path, rank: int = 0) -> list[float]:
    return [one.loss for one in of_kind(folder, StepDone, rank)]


def run_alone(folder: Path, *hooks: Hook, **tables: dict[str, Any]) -> None:
    tables["train"] = {"steps": NUM_STEPS, **tables.get("train", {})}
    run_session(open_session(folder, hooks=hooks, **tables))


@pytest.mark.usefixtures("alone", "eager")
def test_the_next_steps_are_traced_and_no_number_changes(tmp_path: Path) -> None:
    request = TraceRequest("mine", 3)
    run_alone(tmp_path / "asked", Ask(request))
    run_alone(tmp_path / "quiet")
    assert losses(tmp_path / "asked") == losses(tmp_path / "quiet")
    # found before the vote of step 2; step 3 is the warm-up
    assert TraceMailbox(tmp_path / "asked").answer_to(request) == TraceAnswer("mine", "", 4, 6, 0, [0])
    (path,) = traces(tmp_path / "asked").values()
    assert path.parent.name == "step-00000004"
    assert [one.name for one in path.parent.iterdir()] == [path.name]
    trace = read_rank_trace(path)
    assert [one.step for one in trace.header.steps] == [4, 5, 6]
    marks = [one for one in trace.events if one.category == "user_annotation" and one.name.startswith("step")]
    assert [one.name for one in marks] == ["step 4", "step 5", "step 6"]
    for step, mark in zip(trace.header.steps, marks, strict=True):
        assert step.begin_ns - CONVERSION_NS <= mark.begin_ns, "torch's clock and ours are one"
        assert mark.end_ns <= step.end_ns + CONVERSION_NS
        inside = [one for one in trace.events if step.begin_ns <= one.begin_ns < step.end_ns]
        assert sum(one.name == "aten::addmm" for one in inside) == 4, "two layers, two micro-batches"


@pytest.mark.usefixtures("alone", "eager")
def test_the_phases_add_up_and_agree_with_what_every_step_records(tmp_path: Path) -> None:
    run_alone(tmp_path, Ask(TraceRequest("mine", 3)))
    (path,) = traces(tmp_path).values()
    header = read_rank_trace(path).header
    recorded = {one.step: one for one in of_kind(tmp_path, StepPhases)}
    names = ("data", "forward", "backward", "optimizer", "vote")
    agree = set()
    for step in header.steps:
        spans = [one for one in header.phase_spans() if one.step == step.step]
        assert spans[0].begin_ns == step.begin_ns
        assert spans[-1].end_ns == step.end_ns
        assert all(one.end_ns == following.begin_ns for one, following in pairwise(spans))
        for name in names:
            traced = sum(one.end_ns - one.begin_ns for one in spans if one.name == name) / 1e9
            if traced == pytest.approx(recorded[step.step].phases[name], rel=0.2, abs=1e-3):
                agree.add(name)
    assert agree == set(names), "in one of the steps: a process that loses its processor between two clocks is busy"
    assert recorded[7].phases["trace"] > 0, "stopping it takes time, which is told"


@pytest.mark.gpu
@pytest.mark.usefixtures("alone", "eager")
def test_on_a_gpu_its_busy_and_its_idle_time_are_told(tmp_path: Path) -> None:
    run_alone(
        tmp_path / "asked", Ask(TraceRequest("mine", 3)), run={"device": "cuda", "folder": str(tmp_path / "asked")}
    )
    run_alone(tmp_path / "quiet", run={"device": "cuda", "folder": str(tmp_path / "quiet")})
    assert losses(tmp_path / "asked") == losses(tmp_path / "quiet")
    (path,) = traces(tmp_path / "asked").values()
    summary = summarize_rank(read_rank_trace(path))
    assert summary.num_steps == 3
    assert summary.device is not None
    assert summary.device.busy_s > 0 < summary.device.idle_s
    assert summary.device.num_kernels >= summary.device.num_launches > 0
    assert summary.top_kernels


@pytest.mark.usefixtures("alone", "eager")
@pytest.mark.parametrize(
    ("request_", "after", "profile", "why"),
    [
        (TraceRequest("mine", 3, [1]), 1, "", "there is no rank 1"),
        (TraceRequest("mine", 1000), 1, "", "between 1 and 100 steps"),
        (TraceRequest("mine", 3), 1, "5:6", "the job traces steps 5 to 5 itself"),
        (TraceRequest("mine", 3), NUM_STEPS - 1, "", "the run ended before the trace began"),
        (TraceRequest("mine", 3), NUM_STEPS - 2, "", "the run ends with the next step"),
    ],
)
def test_what_cannot_be_traced_is_refused_with_the_reason(
    tmp_path: Path, request_: TraceRequest, after: int, profile: str, why: str
) -> None:
    run_alone(tmp_path, Ask(request_, after), telemetry={"profile": profile})
    answer = TraceMailbox(tmp_path).answer_to(request_)
    assert answer is not None
    assert why in answer.refusal
    assert traces(tmp_path) == {}
    assert len(losses(tmp_path)) == NUM_STEPS


@pytest.mark.usefixtures("alone", "eager")
def test_a_run_that_ends_meanwhile_keeps_what_it_has(tmp_path: Path) -> None:
    run_alone(tmp_path, Ask(TraceRequest("mine", 100), NUM_STEPS - 4))
    (path,) = traces(tmp_path).values()
    assert [one.step for one in read_rank_trace(path).header.steps] == [NUM_STEPS - 1, NUM_STEPS]


@pytest.mark.usefixtures("alone", "eager")
def test_a_second_request_is_granted_when_the_first_is_done(tmp_path: Path) -> None:
    run_alone(tmp_path, Ask(TraceRequest("first", 2)), Ask(TraceRequest("second", 1), 4), train={"steps": 12})
    found = sorted(tmp_path.glob("traces/step-*/rank-*.json.gz"))
    headers = [read_rank_trace(path).header for path in found]
    assert [(one.request, [step.step for step in one.steps]) for one in headers] == [("first", [4, 5]), ("second", [8])]


@pytest.mark.usefixtures("alone", "eager")
def test_a_profiler_of_the_users_own_is_left_alone(tmp_path: Path) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as own:
        run_alone(tmp_path, Ask(TraceRequest("mine", 2)))
    assert len(losses(tmp_path)) == NUM_STEPS
    assert own.events()
    why = [one.what for one in of_kind(tmp_path, Warned) if "trace" in one.what]
    assert len(why) == 1, "nothing could be traced, and the run says so"
    assert len(list(tmp_path.glob("traces/step-*/*.failed"))) == 1


@pytest.mark.usefixtures("alone", "eager")
def test_rubbish_in_the_mailbox_is_a_warning(tmp_path: Path) -> None:
    class Litter(Hook):
        def on_step(self, session: Session, step: StepDone) -> None:
            if step.step == 1:
                (tmp_path / "traces").mkdir()
                (tmp_path / "traces" / "request.json").write_text("rubbish")

    run_alone(tmp_path, Litter())
    assert len(losses(tmp_path)) == NUM_STEPS
    assert [one.what for one in of_kind(tmp_path, Warned) if "request" in one.what]


def train_layout(folder: str, layout: str, request: TraceRequest | None, local: int = 0) -> None:
    from closeranks.run.components import step_traces

    step_traces._LOOK_S = 0.0
    tables: dict[str, Any] = {**TABLES, "layout": asdict(Layout.parse(layout)), "checkpoint": {"save": False}}
    tables["train"] = {**TABLES["train"], "steps": NUM_STEPS, "global_batch": 4}
    if local:
        tables["sync"] = {"local": {"every": local}}
    hooks = [Ask(request)] if request else []
    run_session(Session.from_job(load_job(None, extra=tables).value, Path(folder), hooks))


def votes(trace: RankTrace) -> Iterator[tuple[int, int]]:
    """When this rank entered and left the vote of each step."""
    for step in trace.header.steps:
        spans = [one for one in trace.header.phase_spans() if one.step == step.step and one.name == "vote"]
        yield spans[0].begin_ns, spans[-1].end_ns


def are_on_one_clock(found: Mapping[int, RankTrace], shift_ns: int = 0) -> bool:
    """Nobody leaves a vote before everybody has entered it. ``shift_ns``: added to the clock of the last rank."""
    shifts = dict.fromkeys(found, 0) | {max(found): shift_ns}
    for meeting in zip(*(votes(trace) for trace in found.values()), strict=True):
        moved = [
            (enter + shifts[rank], leave + shifts[rank]) for rank, (enter, leave) in zip(found, meeting, strict=True)
        ]
        if max(enter for enter, _ in moved) > min(leave for _, leave in moved) + CONVERSION_NS:
            return False
    return True


@pytest.mark.world
@pytest.mark.parametrize("layout", ["data=2", "pipeline=2", "tensor=2", "data=2 zero=3", "data=2 pipeline=2"])
def test_all_ranks_trace_the_same_steps_under_every_layout(tmp_path: Path, layout: str) -> None:
    size = Layout.parse(layout).num_ranks
    run_world(train_layout, size, str(tmp_path / "asked"), layout, TraceRequest("mine", 3))
    run_world(train_layout, size, str(tmp_path / "quiet"), layout, None)
    for rank in range(size):
        assert losses(tmp_path / "asked", rank) == losses(tmp_path / "quiet", rank)
    paths = traces(tmp_path / "asked")
    found = {rank: read_rank_trace(path) for rank, path in paths.items()}
    assert list(found) == list(range(size))
    assert all([one.step for one in trace.header.steps] == [4, 5, 6] for trace in found.values())
    assert {trace.header.place for trace in found.values()} == places(layout)
    assert are_on_one_clock(found)
    longest = max(trace.header.steps[-1].end_ns - trace.header.steps[0].begin_ns for trace in found.values())
    assert not are_on_one_clock(found, 2 * longest), "the comparison can fail"
    summary = merge_traces(paths, tmp_path / "all.json.gz")
    assert [one.num_steps for one in summary.ranks] == [3] * size
    assert summary.clock_error_s == pytest.approx(5e-5)
    with gzip.open(tmp_path / "all.json.gz") as file:
        events = json.load(file)["traceEvents"]
    steps = [(one["pid"], one["name"]) for one in events if one.get("cat") == "step"]
    assert steps == [(rank, f"step {step}") for rank in range(size) for step in (4, 5, 6)]


def places(layout: str) -> set[str]:
    sizes = [word.split("=") for word in layout.split() if not word.startswith("zero")]
    found = [""]
    for name, size in sizes:
        found = [f"{one} {name} {number}".strip() for one in found for number in range(int(size))]
    return set(found)


@pytest.mark.world
def test_some_ranks_alone_can_be_traced(tmp_path: Path) -> None:
    run_world(train_layout, 2, str(tmp_path), "data=2", TraceRequest("mine", 2, [1]))
    assert list(traces(tmp_path)) == [1]


@pytest.mark.world
def test_replicas_that_synchronize_rarely_begin_at_the_same_step(tmp_path: Path) -> None:
    run_world(train_layout, 2, str(tmp_path), "data=2", TraceRequest("mine", 3), 3)
    found = {rank: read_rank_trace(path) for rank, path in traces(tmp_path).items()}
    # step 1 is told at the outer step after step 3; asked in 4, read at the outer step after 6, warm-up in 7
    assert {rank: [one.step for one in trace.header.steps] for rank, trace in found.items()} == {0: [8], 1: [8]}


@pytest.mark.usefixtures("alone")
def test_looking_for_a_request_costs_next_to_nothing(tmp_path: Path) -> None:
    """Rank 0 looks at the clock in every step, and into its folder twice a second."""
    session = open_session(tmp_path)
    (before,) = [one for one in session.engine.components.phases["before_vote"] if "StepTraces" in repr(one)]
    ballot: Any = None  # it is touched for a request only
    cost = python_calls(lambda: before(5, ballot), number=200)
    session.close()
    assert cost < 50, "some 10"
