"""Who is given up, and when: by made-up progress, and by real processes that hang in every way we know."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from closeranks.agent.detection.hang import (
    Hang,
    HangDeadlines,
    HangDetector,
    ProcessSample,
    find_hang,
    find_stall,
    longest_by_phase,
    merge_hangs,
    narrow_by_kernel,
    narrow_by_stack,
    position,
)
from closeranks.agent.detection.process_probe import (
    ask_for_stacks,
    kernel_state,
    main_thread_location,
    sample_processes,
)
from closeranks.agent.detection.progress import STEADY, SharedProgress, WorkerPhase, WorkerProgress, create_progress_fd
from tests.agent.world_forker import HUNG_STEP, Order, WorldForker, open_world_forker

KNOWN = dict.fromkeys(WorkerPhase, 0.005)
DEADLINES = HangDeadlines(floor_s=5.0, factor=8.0, first_s=600.0)


def _progress(
    step: int, phase: WorkerPhase, at: float, tick: int = 0, longest: Mapping[WorkerPhase, float] = KNOWN
) -> WorkerProgress:
    return WorkerProgress(step, phase, at, tick, longest=dict(longest))


# --- deadlines


def test_a_steady_phase_has_so_many_times_its_longest_and_never_less_than_the_floor() -> None:
    assert DEADLINES.limit_s(WorkerPhase.COMPUTE, 0.005) == 5.0
    assert DEADLINES.limit_s(WorkerPhase.COMPUTE, 60.0) == 480.0


@pytest.mark.parametrize("phase", [WorkerPhase.START, WorkerPhase.HOOK, WorkerPhase.COMPILE, WorkerPhase.SAVE])
def test_what_earlier_visits_say_nothing_of_has_the_first_deadline_always(phase: WorkerPhase) -> None:
    assert DEADLINES.limit_s(phase, 0.001) == 600.0
    assert DEADLINES.limit_s(phase, 100.0) == 800.0


@pytest.mark.parametrize("phase", list(WorkerPhase))
def test_a_phase_never_seen_has_the_first_deadline(phase: WorkerPhase) -> None:
    assert DEADLINES.limit_s(phase, None) == 600.0


def test_reading_is_waited_for_longer_than_computing() -> None:
    assert DEADLINES.limit_s(WorkerPhase.DATA, 0.001) == 50.0
    assert DEADLINES.limit_s(WorkerPhase.EVALUATE, 20.0) == 160.0


def test_the_first_visit_of_a_new_generation_goes_by_what_earlier_ones_took() -> None:
    assert DEADLINES.limit_s(WorkerPhase.COMPUTE, None, earlier_s=0.1) == 50.0
    assert DEADLINES.limit_s(WorkerPhase.COMPUTE, None, earlier_s=60.0) == 480.0
    assert DEADLINES.limit_s(WorkerPhase.COMPUTE, 0.1, earlier_s=60.0) == 5.0


@given(st.sampled_from(list(WorkerPhase)), st.none() | st.floats(0, 1e4), st.none() | st.floats(0, 1e4))
def test_no_deadline_is_below_the_floor_nor_below_the_factor(
    phase: WorkerPhase, longest_s: float | None, earlier_s: float | None
) -> None:
    limit_s = DEADLINES.limit_s(phase, longest_s, earlier_s)
    assert limit_s >= DEADLINES.floor_s
    assert longest_s is None or limit_s >= DEADLINES.factor * longest_s


# --- who decides


def test_who_waits_is_not_given_up_while_the_one_behind_is_within_its_deadline() -> None:
    slow = {**KNOWN, WorkerPhase.COMPUTE: 60.0}
    progress_of = {0: _progress(7, WorkerPhase.REDUCE, 10.0), 1: _progress(7, WorkerPhase.COMPUTE, 5.0, longest=slow)}
    assert find_hang(progress_of, 400.0, DEADLINES) is None
    hang = find_hang(progress_of, 486.0, DEADLINES)
    assert hang == Hang((1,), 7, WorkerPhase.COMPUTE, 5.0, 480.0)
    assert hang.culprit == 1


def test_a_hook_of_one_rank_keeps_all_others_alive() -> None:
    progress_of = {
        0: _progress(7, WorkerPhase.HOOK, 10.0),
        1: _progress(8, WorkerPhase.REDUCE, 10.0),
        2: _progress(7, WorkerPhase.EVALUATE, 10.0),
    }
    assert find_hang(progress_of, 600.0, DEADLINES) is None


def test_a_compiler_keeps_those_alive_that_wait_for_it_in_the_same_forward() -> None:
    progress_of = {0: _progress(7, WorkerPhase.COMPUTE, 10.0), 1: _progress(7, WorkerPhase.COMPILE, 10.0)}
    assert find_hang(progress_of, 600.0, DEADLINES) is None


def test_all_alike_stand_still_together_by_the_last_of_them_and_the_slowest() -> None:
    slow = {**KNOWN, WorkerPhase.COMPUTE: 1.0}
    progress_of = {0: _progress(7, WorkerPhase.COMPUTE, 10.0), 1: _progress(7, WorkerPhase.COMPUTE, 11.0, longest=slow)}
    assert find_hang(progress_of, 18.9, DEADLINES) is None
    hang = find_hang(progress_of, 19.1, DEADLINES)
    assert hang is not None
    assert (hang.suspects, hang.culprit) == ((0, 1), None)


def test_who_has_done_fewer_micro_batches_is_behind() -> None:
    progress_of = {
        0: _progress(7, WorkerPhase.COMPUTE, 10.0, tick=2),
        1: _progress(7, WorkerPhase.COMPUTE, 10.0, tick=1),
    }
    hang = find_hang(progress_of, 16.0, DEADLINES)
    assert hang is not None
    assert hang.suspects == (1,)


def test_ticks_say_nothing_outside_the_forward() -> None:
    """A short last step leaves some replicas with fewer micro-batches."""
    assert position(_progress(3, WorkerPhase.REDUCE, 0.0, tick=1)) == position(
        _progress(3, WorkerPhase.REDUCE, 0.0, tick=2)
    )


def test_nobody_is_left_to_judge() -> None:
    assert find_hang({}, 1e9, DEADLINES) is None


@given(
    st.dictionaries(
        st.integers(0, 7),
        st.tuples(st.integers(1, 3), st.sampled_from(list(WorkerPhase)), st.floats(0, 100), st.integers(0, 3)),
        min_size=1,
    )
)
def test_whoever_is_named_is_as_far_behind_as_any_and_older_than_its_deadline(
    drawn: dict[int, tuple[int, WorkerPhase, float, int]],
) -> None:
    progress_of = {rank: _progress(*one) for rank, one in drawn.items()}
    hang = find_hang(progress_of, 101.0, HangDeadlines(1.0, 8.0, 60.0))
    if hang is None:
        return
    assert {position(progress_of[rank]) for rank in hang.suspects} == {min(map(position, progress_of.values()))}
    assert all(101.0 - progress_of[rank].at > 1.0 for rank in hang.suspects)


# --- over time


def _look_along(
    watch: HangDetector, progress_of: Mapping[int, WorkerProgress], states: Mapping[int, str], times: list[float]
) -> float:
    """When the verdict falls."""
    for now in times:
        if watch.check(progress_of, states, now) is not None:
            return now
    return float("inf")


def _every(seconds: float, first: float, last: float) -> list[float]:
    return [first + number * seconds for number in range(int((last - first) / seconds))]


def test_a_stopped_process_is_given_up_soon_whatever_it_was_at() -> None:
    progress_of = {0: _progress(8, WorkerPhase.REDUCE, 10.0), 1: _progress(7, WorkerPhase.SAVE, 10.0)}
    at = _look_along(HangDetector(DEADLINES), progress_of, {0: "S", 1: "T"}, _every(0.5, 9.0, 30.0))
    assert 11.0 <= at <= 13.0
    quick = _look_along(
        HangDetector(replace(DEADLINES, floor_s=0.8)), progress_of, {0: "S", 1: "T"}, _every(0.2, 9.0, 30.0)
    )
    assert 9.8 <= quick < 11.0, "never later than anybody else"
    assert _look_along(HangDetector(DEADLINES), progress_of, {0: "S", 1: "t"}, _every(0.5, 9.0, 30.0)) > 30.0


def test_one_that_is_stopped_now_and_then_but_goes_on_is_left_alone() -> None:
    watch = HangDetector(DEADLINES)
    for number, now in enumerate(_every(0.5, 10.0, 30.0)):
        progress_of = {0: _progress(7 + number, WorkerPhase.COMPUTE, now)}
        assert watch.check(progress_of, {0: "T"}, now) is None


def test_time_in_which_the_agent_was_held_up_itself_counts_for_nobody() -> None:
    watch, progress_of = HangDetector(DEADLINES), {0: _progress(7, WorkerPhase.COMPUTE, 10.0)}
    assert watch.check(progress_of, {0: "S"}, 10.5) is None
    assert watch.check(progress_of, {0: "S"}, 500.0) is None
    at = _look_along(watch, progress_of, {0: "S"}, _every(0.5, 500.5, 600.0))
    assert 505.0 < at < 506.0


def test_what_a_generation_learned_holds_for_the_first_steps_of_the_next() -> None:
    watch = HangDetector(DEADLINES)
    watch.check({0: _progress(7, WorkerPhase.COMPUTE, 10.0, longest={WorkerPhase.COMPUTE: 10.0})}, {}, 10.5)
    watch.begin()
    progress_of = {0: _progress(7, WorkerPhase.COMPUTE, 20.0, longest={})}
    assert 100.0 <= _look_along(watch, progress_of, {}, _every(0.5, 20.0, 200.0)) <= 101.0


def test_longest_of_all_ranks_and_generations() -> None:
    progress_of = [
        _progress(1, WorkerPhase.DATA, 0, longest={WorkerPhase.DATA: 1.0}),
        _progress(1, WorkerPhase.DATA, 0, longest={WorkerPhase.DATA: 3.0}),
    ]
    assert longest_by_phase(progress_of, {WorkerPhase.DATA: 2.0, WorkerPhase.VOTE: 1.0}) == {
        WorkerPhase.DATA: 3.0,
        WorkerPhase.VOTE: 1.0,
    }


@given(st.integers(0, 10_000), st.sampled_from([0.005, 0.5, 60.0]))
def test_a_healthy_job_is_left_alone_at_any_step_time_with_evaluations_saves_hooks_and_compiling_in_between(
    seed: int, step_s: float
) -> None:
    """Simulated: every phase varies threefold, rare ones come at random, and the agent looks at every moment's end."""
    draw, longest, seen = random.Random(seed), dict[WorkerPhase, float](), set[WorkerPhase]()
    now, watch = 100.0, HangDetector(DEADLINES)
    for step in range(1, 60):
        plan = [
            (WorkerPhase.DATA, 0.01),
            (WorkerPhase.COMPUTE, 1.0),
            (WorkerPhase.REDUCE, 0.3),
            (WorkerPhase.VOTE, 0.01),
            (WorkerPhase.UPDATE, 0.1),
        ]
        rare = [
            (WorkerPhase.EVALUATE, 30.0),
            (WorkerPhase.SAVE, 20.0),
            (WorkerPhase.HOOK, 100.0 / step_s),
            (WorkerPhase.COMPILE, 90 / step_s),
        ]
        plan += [one for one in rare if draw.random() < 0.05]
        for phase, share in plan:
            at, spent_s = now, share * step_s * draw.uniform(0.5, 1.5)
            if phase not in seen:
                spent_s = min(spent_s * 3, 590.0)
            spent_s = min(spent_s, 590.0)
            for now in [at + spent_s * part / 4 for part in range(1, 5)]:
                assert watch.check({0: _progress(step, phase, at, longest=longest)}, {0: "S"}, now) is None
            again = phase in STEADY and phase in longest
            longest[phase] = max(spent_s, longest[phase] * 0.95 if again else longest.get(phase, 0.0))
            seen.add(phase)


# --- whom the kernel gives away

LOCK, ELSEWHERE = ProcessSample("S", "lock"), ProcessSample("S", "230")


@pytest.mark.parametrize(
    ("samples", "named"),
    [
        ({0: LOCK, 1: ELSEWHERE, 2: LOCK}, (1,)),
        ({0: LOCK, 1: ProcessSample("R", "running", 0.9), 2: LOCK}, (1,)),
        ({0: LOCK, 1: ProcessSample("S", "lock", 0.9), 2: LOCK}, (1,)),
        ({0: LOCK, 1: ProcessSample("T", "lock"), 2: ELSEWHERE}, (1,)),
        ({0: LOCK, 1: ProcessSample("D", "0"), 2: LOCK}, (1,)),
        ({0: ProcessSample("R", "running", 1.0), 1: ELSEWHERE, 2: ProcessSample("R", "running", 1.0)}, (1,)),
        ({0: LOCK, 1: LOCK, 2: LOCK}, (0, 1, 2)),
        ({0: ELSEWHERE, 1: ELSEWHERE, 2: ELSEWHERE}, (0, 1, 2)),
        ({0: ProcessSample("S"), 1: ProcessSample("S"), 2: ProcessSample("S")}, (0, 1, 2)),
        ({}, (0, 1, 2)),
    ],
)
def test_blame(samples: dict[int, ProcessSample], named: tuple[int, ...]) -> None:
    hang = Hang((0, 1, 2), 7, WorkerPhase.COMPUTE, 10.0, 5.0)
    assert narrow_by_kernel(hang, samples).suspects == named


def test_all_may_be_stopped() -> None:
    hang = narrow_by_kernel(
        Hang((0, 1), 7, WorkerPhase.COMPUTE, 10.0, 5.0), {0: ProcessSample("T"), 1: ProcessSample("T")}
    )
    assert (hang.suspects, hang.kind) == ((0, 1), "stopped")


def test_who_is_elsewhere_in_python_than_most_is_named_and_half_is_not_most() -> None:
    hang = Hang((0, 1, 2, 3), 7, WorkerPhase.COMPUTE, 10.0, 5.0)
    assert narrow_by_stack(hang, {0: "a", 1: "b", 2: "a", 3: "a"}).suspects == (1,)
    assert narrow_by_stack(hang, {0: "a", 1: "b", 2: "a", 3: "b"}).suspects == (0, 1, 2, 3)
    assert narrow_by_stack(hang, {}).suspects == (0, 1, 2, 3)


def test_the_cause_is_one_line_for_people() -> None:
    hang = Hang((1,), 7, WorkerPhase.COMPUTE, 10.0, 5.0)
    assert hang.cause(15.2) == "made no progress for 5.2 s, computing gradients"
    stopped = replace(hang, is_stopped=True, phase=WorkerPhase.DATA)
    assert stopped.cause(15.2) == "was stopped by a signal or a frozen cgroup for 5.2 s, waiting for data"


# --- over several hosts

HOSTS = {0: "a", 1: "a", 2: "b", 3: "b"}


def test_a_host_whose_workers_only_wait_accuses_nobody() -> None:
    progress_of = {rank: _progress(7, WorkerPhase.REDUCE, 10.0) for rank in (0, 1, 2)} | {
        3: _progress(7, WorkerPhase.COMPUTE, 10.0)
    }
    waiting, behind = Hang((0, 1), 7, WorkerPhase.REDUCE, 10.0, 5.0), Hang((3,), 7, WorkerPhase.COMPUTE, 10.0, 5.0)
    assert merge_hangs({"a": waiting}, HOSTS, progress_of) is None
    assert merge_hangs({"a": waiting, "b": behind}, HOSTS, progress_of) == behind


def test_where_all_are_alike_the_host_that_knows_why_is_believed() -> None:
    progress_of = {rank: _progress(7, WorkerPhase.COMPUTE, 10.0) for rank in HOSTS}
    waiting = Hang((0, 1), 7, WorkerPhase.COMPUTE, 10.0, 5.0)
    sharp = Hang((3,), 7, WorkerPhase.COMPUTE, 10.0, 5.0, why="asleep, and not in a collective")
    assert merge_hangs({"b": sharp}, HOSTS, progress_of) is None
    assert merge_hangs({"a": waiting, "b": sharp}, HOSTS, progress_of) == sharp
    both = merge_hangs({"a": waiting, "b": replace(sharp, suspects=(2, 3), why="")}, HOSTS, progress_of)
    assert both is not None
    assert both.suspects == (0, 1, 2, 3)


def test_a_stopped_rank_is_certain_and_a_claim_that_is_overtaken_is_void() -> None:
    progress_of = {rank: _progress(7, WorkerPhase.COMPUTE, 10.0) for rank in HOSTS} | {
        3: _progress(8, WorkerPhase.COMPUTE, 11.0)
    }
    stopped = Hang((2,), 7, WorkerPhase.COMPUTE, 10.0, 5.0, is_stopped=True)
    assert merge_hangs({"b": stopped}, HOSTS, progress_of) == stopped
    assert merge_hangs({"b": replace(stopped, suspects=(3,))}, HOSTS, progress_of) is None
    assert merge_hangs({}, HOSTS, {}) is None


# --- real processes


@pytest.fixture(scope="module")
def forker() -> Iterator[WorldForker]:
    with open_world_forker() as opened:
        yield opened


QUICK = HangDeadlines(floor_s=0.8, factor=8.0, first_s=60.0)


@dataclass
class Found:
    hang: Hang | None
    after_s: float = 0.0
    """From the culprit's last sign of life to the verdict."""


def _watch(
    forker: WorldForker,
    order: Order,
    *,
    stop_rank: int | None = None,
    patience_s: float = 120.0,
    deadlines: HangDeadlines = QUICK,
) -> Found:
    """What an agent does: read the progress, ask the kernel, and name."""
    fds = [create_progress_fd() for _ in order.progress_paths]
    shared = [SharedProgress(fd) for fd in fds]
    order = replace(order, progress_paths=[f"/proc/{os.getpid()}/fd/{fd}" for fd in fds])
    pids = forker.fork(order)
    try:
        watch, begun_at = HangDetector(deadlines), time.monotonic()
        while (now := time.monotonic()) < begun_at + patience_s:
            seen = {rank: one.read() for rank, one in enumerate(shared)}
            if stop_rank is not None and (seen[stop_rank].step or 0) > HUNG_STEP:
                os.kill(pids[stop_rank], signal.SIGSTOP)
                stop_rank = None
            hang = watch.check(seen, {rank: kernel_state(pid) for rank, pid in enumerate(pids)}, now)
            if hang is not None:
                return Found(_name(hang, pids, order), now - hang.since)
            time.sleep(watch.every_s)
        return Found(None)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for one, fd in zip(shared, fds, strict=True):
            one.close()
            os.close(fd)


def _name(hang: Hang, pids: list[int], order: Order) -> Hang:
    if hang.culprit is None and not hang.is_stopped:
        hang = narrow_by_kernel(hang, sample_processes({rank: pids[rank] for rank in hang.suspects}))
    if hang.culprit is None:
        pidfds = [os.pidfd_open(pid) for pid in pids]
        ask_for_stacks(pidfds)
        deadline, places = time.monotonic() + 60.0, dict[int, str]()
        while time.monotonic() < deadline and len(places) < len(pids):
            for rank in range(len(pids)):
                if place := main_thread_location(Path(order.folder, f"stacks-{rank}").read_text().splitlines()):
                    places[rank] = place
            time.sleep(0.02)
        for pidfd in pidfds:
            os.close(pidfd)
        hang = narrow_by_stack(hang, places)
    return hang


@pytest.mark.world
@pytest.mark.parametrize("is_inside", [False, True], ids=["apart", "collectives inside"])
@pytest.mark.parametrize("kind", ["sleep", "collective", "busy", "lock held", "deadlock"])
def test_the_rank_that_hangs_is_named_in_time(forker: WorldForker, tmp_path: Path, kind: str, is_inside: bool) -> None:
    found = _watch(forker, Order(["", "", ""], str(tmp_path), kind, is_inside))
    assert found.hang is not None
    assert (found.hang.culprit, found.hang.kind) == (1, "hang")
    assert (found.hang.step, found.hang.phase) == (HUNG_STEP, WorkerPhase.COMPUTE)
    assert QUICK.floor_s <= found.after_s < QUICK.first_s, "by what earlier visits took"


@pytest.mark.world
@pytest.mark.parametrize("is_inside", [False, True], ids=["apart", "collectives inside"])
def test_a_rank_that_is_stopped_from_outside_is_named_in_time(
    forker: WorldForker, tmp_path: Path, is_inside: bool
) -> None:
    found = _watch(forker, Order(["", "", ""], str(tmp_path), "none", is_inside), stop_rank=1)
    assert found.hang is not None
    assert (found.hang.culprit, found.hang.kind) == (1, "stopped")
    assert found.after_s < QUICK.first_s, "by what earlier visits took"


@pytest.mark.world
def test_ranks_that_are_well_are_left_alone(forker: WorldForker, tmp_path: Path) -> None:
    """Steps of a few milliseconds with an evaluation of 0.3 s now and then; a busy machine may keep one waiting."""
    patient = replace(QUICK, floor_s=3.0)
    assert _watch(forker, Order(["", "", ""], str(tmp_path), "well"), patience_s=5.0, deadlines=patient).hang is None


# --- standstills that are told before any deadline has passed


def test_a_standstill_is_told_when_a_rank_waits_longer_than_ever() -> None:
    progress_of = {0: _progress(7, WorkerPhase.REDUCE, 10.0), 1: _progress(6, WorkerPhase.HOOK, 10.0)}
    assert find_hang(progress_of, 16.0, DEADLINES) is None, "a hook has time"
    assert find_stall(progress_of, 14.9, DEADLINES) is None
    stall = find_stall(progress_of, 15.1, DEADLINES)
    assert stall == Hang((1,), 6, WorkerPhase.HOOK, 10.0, 5.0)


def test_no_standstill_is_told_while_a_rank_makes_progress_or_none_waits_unusually_long() -> None:
    hook = _progress(6, WorkerPhase.HOOK, 10.0)
    assert find_stall({0: _progress(7, WorkerPhase.REDUCE, 10.0), 1: replace(hook, at=14.0)}, 16.0, DEADLINES) is None
    slow = {**KNOWN, WorkerPhase.REDUCE: 2.0}
    waits = _progress(7, WorkerPhase.REDUCE, 10.0, longest=slow)
    assert find_stall({0: waits, 1: hook}, 20.0, DEADLINES) is None
    assert find_stall({0: waits, 1: hook}, 26.1, DEADLINES) is not None
    first_time = _progress(7, WorkerPhase.REDUCE, 10.0, longest={})
    assert find_stall({0: first_time, 1: hook}, 500.0, DEADLINES) is None, "it may compile"
    assert find_stall({0: first_time, 1: hook}, 16.0, DEADLINES, is_certain=True) is not None
    assert find_stall({0: first_time, 1: hook}, 14.0, DEADLINES, is_certain=True) is None
    detector, progress_of = HangDetector(DEADLINES), {0: first_time, 1: hook}
    assert detector.stall(progress_of, 16.0, lambda: False) is None
    assert detector.stall(progress_of, 16.0, lambda: True) is not None
    first_batch = _progress(7, WorkerPhase.DATA, 10.0, longest={})
    assert find_stall({0: first_time, 1: replace(first_batch, step=6)}, 14.0, DEADLINES) is None
    assert find_stall({0: first_time, 1: replace(first_batch, step=6)}, 16.0, DEADLINES) is not None
    assert find_stall({0: hook, 1: hook}, 500.0, DEADLINES) is None
    assert find_stall({}, 500.0, DEADLINES) is None
    assert find_stall({0: waits, 1: hook}, 26.1, DEADLINES, awake_since=24.0) is None, "the agent was stopped"
