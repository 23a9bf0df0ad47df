"""Who is slow: by made-up paces, and with a real control group that gives one rank a third of a processor."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from closeranks.agent.detection.progress import SharedProgress, WorkerPhase, WorkerProgress, create_progress_fd
from closeranks.agent.detection.stragglers import SPAN_S, ComputeTime, Straggler, StragglerDetector, expected_times
from closeranks.elastic.faults.cgroups import CPU, CgroupUnavailable, ControlGroup, find_cgroup_parent
from tests.agent.world_forker import Order, WorldForker, open_world_forker


class _Run:
    """Ranks that take steps of known cost, and what is found."""

    def __init__(
        self, tracker: StragglerDetector, lanes: Sequence[int], step_s: float = 0.5, num_servers: int = 0
    ) -> None:
        """The last ``num_servers`` ranks compute nothing."""
        self._tracker, self._pipeline_ranks, self._step_s = tracker, lanes, step_s
        self._num_workers = len(lanes) - num_servers
        self._sums = [0.0] * len(lanes)
        self._num = 0
        self._now = 100.0
        self.found: list[Straggler] = []
        self._look()

    def steps(self, count: int, *costs: float) -> list[int]:
        """Take steps at these costs by rank; who is named during them."""
        before = len(self.found)
        for _ in range(count):
            self._num += 1
            self._now += self._step_s
            self._sums = [total + cost for total, cost in zip(self._sums, costs, strict=True)]
            self._look()
        return [slow.rank for slow in self.found[before:]]

    def _look(self) -> None:
        progress_of = {
            rank: WorkerProgress(
                self._num,
                WorkerPhase.COMPUTE,
                self._now,
                compute_sum_s=total,
                num_timed=self._num if rank < self._num_workers else 0,
                pipeline_rank=pipeline_rank,
            )
            for rank, (total, pipeline_rank) in enumerate(zip(self._sums, self._pipeline_ranks, strict=True))
        }
        self.found += self._tracker.check(progress_of, self._now)


def test_a_slow_rank_is_named_once_after_so_many_steps_and_again_after_it_was_well() -> None:
    run = _Run(StragglerDetector(1.5, 20), [0, 0, 0])
    assert run.steps(19, 1.0, 2.0, 1.1) == []
    assert run.steps(2, 1.0, 2.0, 1.1) == [1]
    assert run.found[0] == Straggler(1, run.found[0].step, pytest.approx(2.0 / 1.05), 2.0, pytest.approx(1.05))
    assert run.steps(100, 1.0, 2.0, 1.1) == []
    assert run.steps(25, 1.0, 1.0, 1.0) == []
    assert run.steps(25, 1.0, 2.0, 1.0) == [1]


def test_a_few_fast_steps_break_the_row() -> None:
    run = _Run(StragglerDetector(1.5, 20), [0, 0])
    for _ in range(5):
        assert run.steps(15, 1.0, 2.0) == []
        assert run.steps(5, 1.0, 1.0) == []


def test_short_steps_are_waited_for_until_the_scheduler_had_its_chance() -> None:
    run = _Run(StragglerDetector(1.5, 20), [0, 0, 0], step_s=0.005)
    assert run.steps(int(SPAN_S / 0.005), 0.005, 0.01, 0.005) == []
    assert run.steps(200, 0.005, 0.01, 0.005) == [1]


def test_a_run_that_is_slow_as_a_whole_names_nobody() -> None:
    run = _Run(StragglerDetector(1.5, 5), [0, 0, 0])
    run.steps(20, 1.0, 1.0, 1.0)
    assert run.steps(50, 9.0, 9.0, 9.0) == []


def test_stages_with_more_work_are_not_slow_and_one_that_becomes_slow_is() -> None:
    run = _Run(StragglerDetector(1.5, 5), [0, 1, 2])
    assert run.steps(50, 1.0, 3.0, 0.5) == []
    assert run.steps(50, 2.0, 6.0, 1.0) == []
    assert run.steps(50, 1.0, 3.0, 1.5) == [2]


def test_stages_that_are_shared_are_compared_within() -> None:
    run = _Run(StragglerDetector(1.5, 5), [0, 0, 1, 1])
    assert run.steps(50, 1.0, 1.0, 3.0, 3.0) == []
    assert run.steps(50, 1.0, 1.0, 3.0, 5.0) == [3]


def test_one_rank_alone_is_compared_with_nobody() -> None:
    assert _Run(StragglerDetector(1.5, 5), [0]).steps(50, 1.0) == []


def test_parameter_servers_are_compared_with_nobody_and_hide_nobody() -> None:
    run = _Run(StragglerDetector(1.5, 20), [0, 0, 0, 0], num_servers=2)
    assert run.steps(21, 1.0, 2.0, 0.0, 0.0) == [1]
    assert run.steps(60, 1.0, 1.1, 0.0, 0.0) == []


def test_a_new_generation_begins_afresh() -> None:
    tracker = StragglerDetector(1.5, 20)
    _Run(tracker, [0, 0]).steps(15, 1.0, 2.0)
    tracker.begin()
    assert _Run(tracker, [0, 0]).steps(15, 1.0, 2.0) == []


@given(st.dictionaries(st.integers(0, 9), st.floats(0.01, 100), min_size=2), st.floats(0.01, 100))
def test_what_is_expected_scales_with_the_machine_and_never_looks_at_the_rank_itself(
    costs: dict[int, float], factor: float
) -> None:
    base = expected_times({rank: ComputeTime(cost) for rank, cost in costs.items()})
    scaled = expected_times({rank: ComputeTime(cost * factor) for rank, cost in costs.items()})
    assert scaled == pytest.approx({rank: seconds * factor for rank, seconds in base.items()})
    for rank in costs:
        changed = {other: ComputeTime(cost if other != rank else cost * 10) for other, cost in costs.items()}
        assert expected_times(changed)[rank] == base[rank]


# --- a real quota


@pytest.fixture(scope="module")
def forker() -> Iterator[WorldForker]:
    with open_world_forker() as opened:
        yield opened


@pytest.fixture
def control_group() -> Iterator[ControlGroup]:
    """Without a quota at first; it goes when its processes have."""
    try:
        group = ControlGroup(find_cgroup_parent(CPU))
    except CgroupUnavailable as reason:
        pytest.skip(str(reason))
    yield group
    group.remove(10.0)


def _ran_s(pid: int) -> float:
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


def _throttle(pid: int, group: ControlGroup) -> None:
    """To a third of what the process took of a processor: on an idle machine a third of one, else less."""
    before_s, started_at = _ran_s(pid), time.monotonic()
    time.sleep(1.5)
    share = (_ran_s(pid) - before_s) / (time.monotonic() - started_at)
    group.limit_cpu(max(0.02, share / 3))


@pytest.mark.world
@pytest.mark.parametrize("is_inside", [False, True], ids=["apart", "collectives inside"])
def test_a_rank_at_a_third_of_its_processor_is_named_and_nobody_else(
    forker: WorldForker, tmp_path: Path, control_group: ControlGroup, is_inside: bool
) -> None:
    fds = [create_progress_fd() for _ in range(3)]
    shared = [SharedProgress(fd) for fd in fds]
    paths = [f"/proc/{os.getpid()}/fd/{fd}" for fd in fds]
    pids = forker.fork(Order(paths, str(tmp_path), "quota", is_inside, str(control_group.path / "cgroup.procs")))
    try:
        tracker, found, deadline = StragglerDetector(1.5, 20), list[Straggler](), time.monotonic() + 60
        while not shared[1].read().num_timed:
            time.sleep(0.05)
        _throttle(pids[1], control_group)
        while not found and time.monotonic() < deadline:
            found = tracker.check({rank: one.read() for rank, one in enumerate(shared)}, time.monotonic())
            time.sleep(0.1)
        assert [slow.rank for slow in found] == [1]
        assert tracker.scores[1] > 1.5
        assert max(tracker.scores[0], tracker.scores[2]) < 1.5
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for one, fd in zip(shared, fds, strict=True):
            one.close()
            os.close(fd)
