"""The numbers the agent goes by are the table's, and so are their defaults."""

from __future__ import annotations

from dataclasses import fields

from closeranks.agent.fault_limits import FaultLimits
from closeranks.elastic.config import ElasticConfig
from closeranks.run.job.resize import fault_limits


def test_the_defaults_are_those_of_the_table() -> None:
    assert fault_limits(ElasticConfig()) == FaultLimits()


def test_every_number_is_carried_over() -> None:
    changed = {
        "hang_floor_s": 1.5,
        "hang_factor": 3.0,
        "first_s": 30.0,
        "stragglers": "evict",
        "slow_ratio": 2.0,
        "slow_steps": 7,
        "max_faults": 3,
        "fault_window_s": 60.0,
        "max_repeats": 4,
        "max_host_faults": 2,
        "min_workers": 2,
        "wait_s": 9.0,
    }
    limits = fault_limits(ElasticConfig(**changed))
    assert {field.name: getattr(limits, field.name) for field in fields(FaultLimits)} == changed


def test_what_the_agent_has_no_use_for_stays_with_the_workers() -> None:
    """Whatever is added to the table is either carried over or named here."""
    own = {"enabled", "snapshot_every", "snapshot_cost", "second_copies"}
    assert {field.name for field in fields(FaultLimits)} == set(ElasticConfig.model_fields) - own
