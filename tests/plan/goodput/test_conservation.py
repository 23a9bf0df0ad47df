"""Whatever happens, no microsecond is lost or counted twice."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from closeranks.facts.failures.failure_rates import SHOWS
from closeranks.plan.goodput.failure_draw import US, DrawnFailure
from closeranks.plan.goodput.scenario import CLOSING_RANKS, RESTART, GoodputScenario, RecoveryStrategy
from closeranks.plan.goodput.simulation import simulate
from closeranks.plan.goodput.training_progress import TrainingProgress
from tests.plan.goodput.cases import FREE_SNAPSHOTS, NO_FAILURES, failure, scenario

WALL_S = 5000.0
STRATEGIES = st.sampled_from([CLOSING_RANKS, RESTART, FREE_SNAPSHOTS]).flatmap(
    lambda strategy: st.builds(
        lambda shrinks, every: replace(strategy, shrinks=shrinks, snapshot_every=every),
        st.booleans(),
        st.integers(1, 3),
    )
)
SCENARIOS = st.builds(
    scenario,
    num_devices=st.sampled_from([2, 8, 14]),
    wall_s=st.floats(0.5, WALL_S),
    step_s=st.floats(0.1, 50),
    stall_s=st.floats(0, 9),
    durable_s=st.floats(9, 200),
    save_every_s=st.floats(1, 500) | st.just(0.0),
    spares=st.integers(0, 2),
    cold_spares=st.integers(0, 2),
    cold_s=st.floats(0, 300),
    replica_hosts=st.integers(1, 3),
    least_share=st.floats(0, 1),
)


@st.composite
def failures(draw: st.DrawFn) -> list[DrawnFailure]:
    found = draw(
        st.lists(
            st.builds(
                failure,
                st.floats(0, WALL_S),
                repair_s=st.floats(0, 3000),
                copies=st.floats(0, 1),
                shows=st.sampled_from(SHOWS),
                hosts=st.integers(0, 3),
                notice_s=st.sampled_from([0.0, 5.0, 600.0]),
                slowdown=st.floats(1, 3),
            ),
            max_size=15,
        )
    )
    return sorted(found, key=lambda one: one.at_us)


@settings(max_examples=120, deadline=None)
@given(SCENARIOS, STRATEGIES, failures())
def test_rows_add_up_to_workers_times_wall_time_exactly(
    case: GoodputScenario, strategy: RecoveryStrategy, drawn: list[DrawnFailure]
) -> None:
    found = simulate(case, strategy, NO_FAILURES, drawn)
    assert sum(found.rows.values()) == found.num_workers * found.wall_us
    assert min(found.rows.values()) >= 0
    assert found.num_interruptions + found.num_planned + found.num_evicted <= len(drawn)
    assert 0 <= found.cold_host_s <= case.cold_spares * (found.wall_us / US) + 1e-6
    hosts = case.num_hosts + case.spares + case.cold_spares
    assert 0 <= found.repair_host_s <= hosts * (found.wall_us / US) + 1e-6


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(1, 900), max_size=4), st.integers(4, 6))
def test_hosts_are_under_repair_for_as_long_as_their_repairs_take(repairs_s: list[float], spares: int) -> None:
    drawn = [failure(100.0 * number, hosts=1, repair_s=repair_s) for number, repair_s in enumerate(repairs_s)]
    found = simulate(scenario(spares=spares), RESTART, NO_FAILURES, drawn)
    expected_us = sum(min(one.repair_us, found.wall_us - one.at_us) for one in drawn)
    assert found.repair_host_s == expected_us / US


@settings(max_examples=100, deadline=None)
@given(
    pieces=st.lists(st.integers(0, 400 * US), min_size=1, max_size=12),
    stall_us=st.integers(0, 9 * US),
    save_every_s=st.sampled_from([10.0, 30.0, 70.0]),
)
def test_training_in_pieces_is_training_at_once(pieces: list[int], stall_us: int, save_every_s: float) -> None:
    """Skipping whole cycles changes nothing: not what counts, not what is durable."""
    case = scenario(stall_s=stall_us / US, save_every_s=save_every_s)
    whole, parts = (TrainingProgress(case, RESTART, NO_FAILURES) for _ in range(2))
    whole.train(sum(pieces), 8)
    for piece in pieces:
        parts.train(piece, 8)
    assert (whole.position, whole.durable(), whole.rows) == (parts.position, parts.durable(), parts.rows)
