"""Figures of an interval: totals, rates and the busiest of several; unknown is left out."""

from __future__ import annotations

from closeranks.telemetry.resources.reading import Reading, used_between


def test_totals_are_differences_and_rates_are_per_second() -> None:
    before = Reading({"read_bytes": 100}, {"cpus": 10.0}, {"disk_busy_share": {"sda": 1.0, "sdb": 1.0}}, {"load": 1.0})
    after = Reading({"read_bytes": 150}, {"cpus": 13.0}, {"disk_busy_share": {"sda": 1.5, "sdb": 3.0}}, {"load": 2.0})
    assert used_between(before, after, 2.0) == {"load": 2.0, "read_bytes": 50, "cpus": 1.5, "disk_busy_share": 1.0}


def test_a_counter_that_is_new_has_no_figure_and_one_that_fell_shows_nothing() -> None:
    before = Reading({"preemptions": 9}, {}, {"disk_busy_share": {}})
    after = Reading({"preemptions": 3, "net_sent_bytes": 7}, {"cpus": 5.0}, {"disk_busy_share": {"sda": 3.0}})
    assert used_between(before, after, 1.0) == {"preemptions": 0}


def test_counters_of_another_control_group_are_not_compared() -> None:
    before, after = Reading({"throttled_s": 5.0}, subject="/a"), Reading({"throttled_s": 9.0}, subject="/b")
    assert used_between(before, after, 1.0) == {}
    assert used_between(after, after, 1.0) == {"throttled_s": 0}
