"""Whether a run goes on: the limits as laws over made-up histories."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from closeranks.agent.detection.root_cause import external_cause
from closeranks.agent.fault_limits import FaultLimits
from closeranks.agent.job.fault_log import FaultLog, FaultRecord
from closeranks.agent.job.placement import HostPlacement, HostState
from closeranks.agent.job.restart_policy import (
    DesiredSize,
    GiveUp,
    NextGeneration,
    WaitForHosts,
    decide,
    request_at_boundary,
)
from closeranks.agent.launch_plan import ResizedLaunch
from closeranks.core.errors import DataError, RunFailed
from closeranks.core.requests import DRAIN, REGROUP
from tests.agent.faults import fault, raised

LEAD, B, C = HostState("lead", 2, is_leader=True), HostState("b", 2), HostState("c", 2)
ALONE = [HostState("lead", 4, is_leader=True)]


def down_to(*sizes: int) -> Callable[[int], ResizedLaunch | None]:
    """A job that is legal on these numbers of workers alone."""

    def fit(num_available: int) -> ResizedLaunch | None:
        size = max((size for size in sizes if size <= num_available), default=0)
        return ResizedLaunch(size, {"size": size}) if size else None

    return fit


FOUR = DesiredSize(4, down_to(1, 2, 3, 4), lambda step: f"samples {(step - 1) * 8} to {step * 8 - 1} of the run")


def decided(
    faults: list[FaultRecord], limits: FaultLimits | None = None, **changes: float
) -> NextGeneration | WaitForHosts | GiveUp:
    return decide(faults, ALONE, limits or FaultLimits(), changes.get("now", faults[-1].at if faults else 0.0), FOUR)


def gave_up(outcome: NextGeneration | WaitForHosts | GiveUp) -> GiveUp:
    assert isinstance(outcome, GiveUp)
    return outcome


def went(outcome: NextGeneration | WaitForHosts | GiveUp) -> NextGeneration:
    assert isinstance(outcome, NextGeneration)
    return outcome


# --- the budget


@given(st.lists(st.floats(0, 50), max_size=40), st.integers(0, 6), st.floats(1, 30))
@example([0.0, 10.0], 1, 10.0)
def test_within_any_window_a_run_goes_on_at_most_so_often(gaps: list[float], most: int, window_s: float) -> None:
    """Every fault another one, so that nothing but the budget can end the run."""
    limits = FaultLimits(max_faults=most, fault_window_s=window_s)
    faults: list[FaultRecord] = []
    went_on: list[float] = []
    now = 0.0
    for number, gap in enumerate(gaps):
        now += gap
        faults.append(fault(at=now, step=number, num_done=number))
        if isinstance(decided(faults, limits), NextGeneration):
            went_on.append(now)
    for last in went_on:
        assert sum(last - window_s < at <= last for at in went_on) <= most


@given(st.integers(0, 30))
def test_the_budget_is_used_up_to_the_last(most: int) -> None:
    faults = [fault(at=float(number), step=number, num_done=number) for number in range(most + 1)]
    limits = FaultLimits(max_faults=most)
    assert all(isinstance(decided(faults[:count], limits), NextGeneration) for count in range(1, most + 1))
    assert gave_up(decided(faults, limits)).reason == "budget"


def test_a_spent_budget_says_what_the_faults_were() -> None:
    kinds = ["killed", "killed", "hang"]
    faults = [fault(at=n, step=n, kind=kind, host=f"h{n % 2}", cause=f"cause {n}.") for n, kind in enumerate(kinds)]
    assert gave_up(decided(faults, FaultLimits(max_faults=2))).sentence == (
        "3 faults within 60 min (2 killed, 1 hang; 2 of them on h0), more than elastic.max_faults = 2; "
        "the last: cause 2. Fix their common cause, or raise elastic.max_faults."
    )
    assert "a fault within 60 min (1 killed)" in gave_up(decided(faults[:1], FaultLimits(max_faults=0))).what


@pytest.mark.parametrize("kind", ["preempted", "slow", "resize"])
def test_what_is_no_fault_uses_no_budget(kind: str) -> None:
    log, limits = FaultLog(), FaultLimits(max_faults=0, max_repeats=1)
    for generation in range(50):
        verdict = external_cause(kind, "asked to", step=3)  # type: ignore[arg-type]
        log = log.add(verdict, at=0.0, generation=generation, host="lead", num_done=2)
        went(decide(log.faults, ALONE, limits, 0.0, FOUR))


# --- the code's or the data's


def run_until_it_ends(
    fault_at: Callable[[int], FaultRecord], limits: FaultLimits, most: int = 50
) -> tuple[int, GiveUp]:
    """How many faults a run had until it was given up."""
    faults: list[FaultRecord] = []
    for number in range(most):
        faults.append(fault_at(number))
        outcome = decided(faults, limits)
        if isinstance(outcome, GiveUp):
            return len(faults), outcome
    raise AssertionError("it never ended")


@given(st.integers(1, 5), st.integers(1, 99), st.sampled_from(["exception", "oom", "hang", "killed"]))
def test_a_deterministic_fault_ends_the_run_and_is_named(repeats: int, step: int, kind: str) -> None:
    """Whichever rank it strikes, however far apart in time."""
    limits = FaultLimits(max_repeats=repeats, fault_window_s=1.0, max_faults=1)
    count, given_up = run_until_it_ends(
        lambda n: fault(at=n * 1e4, kind=kind, step=step, num_done=step - 1, rank=n, cause="it broke."), limits
    )
    assert count == repeats
    assert given_up.reason == "repeats"
    assert given_up.what.startswith(f"step {step} (samples {(step - 1) * 8} to {step * 8 - 1} of the run) failed")
    assert ("it broke. This is deterministic: the code or the data causes it" in given_up.what) == (repeats > 1)
    assert given_up.fix


@given(st.integers(1, 5), st.lists(st.integers(30, 43), max_size=8))
def test_other_faults_on_the_way_do_not_hide_it(repeats: int, others: list[int]) -> None:
    """Step 43 can never be finished; between its failures the run is thrown back by kills at redone steps."""
    log, limits, count = FaultLog(), FaultLimits(max_repeats=repeats, max_faults=1000), 0
    kills = iter(others)
    while True:
        log = log.add(raised(43), at=0.0, generation=0, host="a", num_done=42)
        count += 1
        outcome = decide(log.faults, ALONE, limits, 0.0, FOUR)
        if isinstance(outcome, GiveUp):
            break
        if (step := next(kills, None)) is not None:
            killed = raised(step, kind="killed", signature=f"kill {len(log.faults)}", is_silent=True)
            log = log.add(killed, at=0.0, generation=0, host="a", num_done=step - 1)
    assert outcome.reason == "repeats"
    assert count == repeats


def test_a_kill_from_outside_needs_one_more() -> None:
    limits = FaultLimits(max_repeats=2)
    count, given_up = run_until_it_ends(lambda n: fault(is_silent=True, num_done=4, cause="killed by SIGKILL"), limits)
    assert count == 3
    assert "failed 3 times in the same way: killed by SIGKILL." in given_up.what
    assert "Find out who kills it" in given_up.fix


@given(st.integers(1, 30))
def test_kills_at_one_step_by_chance_are_survived_where_it_was_finished_between(times: int) -> None:
    log, limits = FaultLog(), FaultLimits(max_repeats=1, max_faults=1000)
    for number in range(times):
        killed = raised(7, kind="killed", signature="SIGKILL", is_silent=True)
        log = log.add(killed, at=0.0, generation=number, host="a", num_done=6)
        went(decide(log.faults, ALONE, limits, 0.0, FOUR))
        finished = external_cause("resize", "a host joined", step=9 + number)
        log = log.add(finished, at=0.0, generation=number, host="a", num_done=8 + number)


def test_without_a_second_try_the_sentence_says_why() -> None:
    assert (
        "step 5 (samples 32 to 39 of the run) failed: it broke; elastic.max_repeats = 1 allows no second try"
        in gave_up(decided([fault(cause="it broke")], FaultLimits(max_repeats=1))).what
    )


def test_a_fault_before_the_first_step_is_named_as_such() -> None:
    faults = [fault(step=None, kind="exception", cause="it broke")] * 2
    what = gave_up(decided(faults)).what
    assert what.startswith(
        "the start of a generation, before its first step, failed 2 times in the same way: it broke."
    )
    assert gave_up(decided(faults)).fix == "Fix the code, then resume with checkpoint.resume."  # no sample was read


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({"kind": "oom"}, "smaller train.micro_batch"),
        ({"kind": "exception", "signature": "OutOfMemoryError at f: CUDA out of memory"}, "smaller train.micro_batch"),
        ({"kind": "hang"}, "Its log shows the stack of each thread"),
        ({"kind": "exception"}, "inspect those samples"),
    ],
)
def test_the_advice_fits_the_fault(changes: dict[str, str], advice: str) -> None:
    given_up = gave_up(decided([fault(**changes)] * 2))
    assert advice in given_up.fix
    assert given_up.fix.endswith("then resume with checkpoint.resume.")


# --- mistakes of the person's


@given(st.lists(st.booleans(), max_size=5))
def test_a_mistake_is_never_tried_again(before: list[bool]) -> None:
    faults = [fault(at=n, step=n) for n, _ in enumerate(before)]
    mistake = fault(at=9.0, step=20, kind="exception", is_user_error=True)
    limits = FaultLimits(max_faults=1000, max_repeats=1000)
    given_up = gave_up(decided([*faults, mistake], limits))
    assert given_up.reason == "mistake"
    error = DataError("no data", "Get some.")
    assert given_up.error(error) is error, "and is told as it was raised"


def test_what_ends_a_run_comes_before_the_report_of_the_last_fault() -> None:
    error = GiveUp("budget", "too many", "Stop it.").error(RunFailed("rank 1 failed\nits log", rank=1, step=4))
    assert isinstance(error, RunFailed)
    assert str(error) == "too many. Stop it.\nrank 1 failed\nits log"
    assert (error.rank, error.step) == (1, 4)


# --- hosts


def test_the_run_goes_on_with_all_of_its_workers() -> None:
    go = went(decide([fault()], [B, LEAD, C], FaultLimits(), 0.0, FOUR))
    assert go.placements == (HostPlacement("lead", 2), HostPlacement("b", 2))
    assert go.num_workers == go.fitted.num_workers == 4


def test_without_room_for_all_it_goes_on_with_what_is_legal() -> None:
    hosts = [LEAD, HostState("b", 2, state="lost"), HostState("c", 1)]
    go = went(decide([fault()], hosts, FaultLimits(), 0.0, FOUR))
    assert go.placements == (HostPlacement("lead", 2), HostPlacement("c", 1))
    even = went(decide([fault()], hosts, FaultLimits(), 0.0, DesiredSize(4, down_to(2, 4))))
    assert even.placements == (HostPlacement("lead", 2),), "one stands by"
    assert even.fitted == ResizedLaunch(2, {"size": 2}, "2 of 4 workers; same batch, order and learning rate")
    told = DesiredSize(4, lambda count: ResizedLaunch(2, {}, "layout data=4 -> data=2"))
    assert went(decide([fault()], hosts, FaultLimits(), 0.0, told)).fitted.summary == "layout data=4 -> data=2"
    assert went(decide([fault()], ALONE, FaultLimits(), 0.0, FOUR)).fitted.summary == ""


def test_a_quarantined_host_is_left_out_where_another_has_room() -> None:
    limits = FaultLimits(max_host_faults=2)
    faults = [fault(at=n, step=n, host="b") for n in range(2)]
    go = went(decide(faults, [LEAD, B, C], limits, 2.0, FOUR))
    assert go.placements == (HostPlacement("lead", 2), HostPlacement("c", 2))
    assert go.quarantined == {"b"}
    short = went(decide(faults, [LEAD, B], limits, 2.0, FOUR))
    assert short.placements == (HostPlacement("lead", 2), HostPlacement("b", 2)), (
        "rather with it than without half of the workers"
    )


hosts_ready = st.lists(st.integers(0, 4), min_size=1, max_size=5).map(
    lambda counts: [HostState(f"h{n}", count, n == 0) for n, count in enumerate(counts)]
)
legal = st.sets(st.integers(1, 12), min_size=1)


@given(hosts_ready, hosts_ready, legal, st.integers(0, 3))
def test_with_more_room_there_are_never_fewer_workers(
    hosts: list[HostState], more: list[HostState], sizes: set[int], num_faults: int
) -> None:
    desired = DesiredSize(max(sizes), down_to(*sizes))
    limits = FaultLimits(max_host_faults=1)
    faults = [fault(at=n, step=n, host=f"h{n}") for n in range(num_faults)]
    joined = [HostState(f"n{host.name}", host.num_workers) for host in more]

    def size(on: list[HostState]) -> int:
        outcome = decide(faults, on, limits, 3.0, desired)
        return outcome.num_workers if isinstance(outcome, NextGeneration) else 0

    few, many = size(hosts), size([*hosts, *joined])
    assert few <= many <= max(sizes)
    assert few in {0, *sizes}


@given(st.integers(0, 8), st.integers(1, 6), legal)
def test_a_run_never_goes_on_with_fewer_than_it_wants(count: int, least: int, sizes: set[int]) -> None:
    desired = DesiredSize(max(sizes), down_to(*sizes))
    outcome = decide(
        [fault()], [HostState("lead", count, is_leader=True)], FaultLimits(min_workers=least), 0.0, desired
    )
    if any(least <= size <= count for size in sizes):
        assert went(outcome).num_workers == max(size for size in sizes if size <= count)
    else:
        assert gave_up(outcome).reason == "room"


def test_too_few_workers_are_told_with_the_reason() -> None:
    def told(desired: DesiredSize, limits: FaultLimits, count: int = 1) -> str:
        return gave_up(decide([fault()], [HostState("lead", count)], limits, 0.0, desired)).sentence

    assert told(FOUR, FaultLimits(min_workers=2)) == (
        "1 worker of 4 can still be started, and elastic.min_workers = 2. Add a host with `closeranks agent --join`, "
        "lower elastic.min_workers or resume later with checkpoint.resume."
    )
    assert "no layout with so few workers is valid for this model and batch" in told(
        DesiredSize(4, down_to(2, 4)), FaultLimits()
    )
    assert "0 workers of 4 can still be started" in told(FOUR, FaultLimits(), 0)
    assert "this run cannot be made smaller" in told(DesiredSize(4), FaultLimits(), 3)


def test_a_run_that_cannot_be_cut_goes_on_whole() -> None:
    assert went(decide([fault()], [HostState("lead", 5)], FaultLimits(), 0.0, DesiredSize(4))).placements == (
        HostPlacement("lead", 4),
    )


def test_a_lost_host_is_waited_for_and_then_done_without() -> None:
    hosts = [LEAD, HostState("b", 2, state="lost", since=10.0)]
    limits = FaultLimits(wait_s=5.0)
    waiting = decide([fault(at=10.0)], hosts, limits, 11.0, FOUR)
    assert isinstance(waiting, WaitForHosts)
    assert waiting == WaitForHosts(15.0, "2 workers can be started without b; waiting 4 s for it or another host")
    assert went(decide([fault(at=10.0)], hosts, limits, 15.0, FOUR)).num_workers == 2
    assert went(decide([fault(at=10.0)], [*hosts, C], limits, 11.0, FOUR)).num_workers == 4, "another joined"
    assert went(decide([fault(at=10.0)], hosts, FaultLimits(), 10.0, FOUR)).num_workers == 2, "nobody is waited for"


def test_where_nothing_is_left_a_host_is_waited_for_too() -> None:
    hosts = [HostState("b", 4, state="lost", since=0.0)]
    assert isinstance(decide([fault()], hosts, FaultLimits(wait_s=5.0), 1.0, FOUR), WaitForHosts)


# --- growing back, and leaving


def boundary(
    here: list[HostPlacement], hosts: list[HostState], faults: tuple[FaultRecord, ...] = (), **limits: int
) -> str:
    return request_at_boundary(here, faults, hosts, FaultLimits(**limits), 1.0, FOUR)  # type: ignore[arg-type]


def test_a_run_that_is_whole_stays() -> None:
    assert boundary([HostPlacement("lead", 2), HostPlacement("b", 2)], [LEAD, B, C]) is None


def test_a_run_that_shrank_grows_when_a_host_joins() -> None:
    assert boundary([HostPlacement("lead", 2)], [LEAD]) is None
    assert boundary([HostPlacement("lead", 2)], [LEAD, B]) == REGROUP
    assert boundary([HostPlacement("lead", 2)], [LEAD, HostState("b", 0)]) is None, "it has no room"


def test_a_host_that_leaves_is_let_go() -> None:
    leaving = HostState("b", 2, state="leaving", since=1.0)
    both = [HostPlacement("lead", 2), HostPlacement("b", 2)]
    assert boundary(both, [LEAD, leaving]) == REGROUP
    assert boundary(both, [LEAD, leaving, C]) == REGROUP
    assert boundary(both, [LEAD, leaving], wait_s=5) == REGROUP
    assert boundary(both, [LEAD, leaving], min_workers=3) == DRAIN, "the others cannot go on alone"
    assert boundary([HostPlacement("lead", 2), HostPlacement("c", 2)], [LEAD, leaving, C]) is None, "it had no workers"


def test_a_run_gets_off_a_bad_host_when_there_is_room_elsewhere() -> None:
    faults = tuple(fault(at=n / 10, step=n, host="b") for n in range(2))
    both = [HostPlacement("lead", 2), HostPlacement("b", 2)]
    assert boundary(both, [LEAD, B], faults, max_host_faults=2) is None
    assert boundary(both, [LEAD, B, C], faults, max_host_faults=2) == REGROUP
    assert boundary([HostPlacement("lead", 2), HostPlacement("c", 2)], [LEAD, B, C], faults, max_host_faults=2) is None


def test_a_run_too_small_for_its_limits_stays_as_it_is() -> None:
    """Nobody leaves: what runs is left alone."""
    assert boundary([HostPlacement("lead", 2)], [HostState("lead", 0, is_leader=True)]) is None
