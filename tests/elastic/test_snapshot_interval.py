from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from closeranks.elastic.snapshot_interval import should_remeasure, snapshot_cost_s, steps_between


def test_cheap_copies_are_taken_every_step() -> None:
    assert steps_between(0.0, 0.0, 0.1, 0.02) == 1
    assert steps_between(0.002, 0.002, 0.15, 0.02) == 1
    assert steps_between(0.003, 0.003, 0.15, 0.02) == 1
    assert steps_between(0.0031, 0.0031, 0.15, 0.02) == 2


def test_waiting_for_the_seal_counts_for_a_copy_after_every_step_alone() -> None:
    assert steps_between(0.0, 1.0, 0.15, 0.02) == 2
    assert steps_between(0.03, 1.0, 0.15, 0.02) == 10


@given(st.floats(1e-6, 10.0), st.floats(0.0, 10.0), st.floats(1e-3, 100.0), st.floats(0.001, 1.0))
def test_the_cost_stays_within_its_share_and_no_step_more_is_given_up(
    stall: float, sealing: float, step: float, share: float
) -> None:
    n = steps_between(stall, stall + sealing, step, share)
    assert 1 <= n <= 1000
    assert (n == 1) == (stall + sealing <= step * share)
    if n < 1000:
        assert stall <= n * step * share * (1 + 1e-9)
        assert n <= 2 or stall > (n - 1) * step * share * (1 - 1e-9)


def test_what_a_device_sends_for_longer_than_a_step_counts_though_nobody_waited() -> None:
    """Measured: 12.5 GB take 0.23 s, a step 0.14 s, and a host that comes late itself sees 1 ms of that."""
    assert steps_between(0.001, 0.001, 0.14, 0.02, send_s=0.23) == 33
    assert steps_between(0.2, 0.2, 0.14, 0.02, send_s=0.23) == 72
    assert steps_between(0.001, 0.001, 0.30, 0.02, send_s=0.23) == 2  # a copy in every step: what is one without?
    assert steps_between(0.001, 0.001, 0.50, 0.02, send_s=0.23) == 1


def test_processor_time_counts_where_no_core_is_to_spare() -> None:
    assert snapshot_cost_s(0.001, 0.02, num_cores=8, num_busy=4) == 0.001
    assert snapshot_cost_s(0.001, 0.02, num_cores=7, num_busy=4) == 0.021


def test_ranks_look_early_and_then_now_and_then() -> None:
    assert [n for n in range(301) if should_remeasure(n)] == [3, 6, 25, 100, 200, 300]
    assert [n for n in range(301) if should_remeasure(n, has_decided=True)] == [25, 100, 200, 300]
