"""A policy is consistent with itself, better than other habits, and a table that a job file takes."""

from __future__ import annotations

import math
import struct
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from closeranks.checkpoint.config import CheckpointConfig, seconds_of
from closeranks.checkpoint.save.save_schedule import MOST_S
from closeranks.facts.checkpoint_policy.save_interval import best_period_s, waste
from closeranks.plan.policy import (
    LOCAL,
    MAX_AUTO_S,
    STORE,
    CheckpointScenario,
    checkpoint_table,
    policy_for,
    single_level,
)
from closeranks.plan.policy_picture import draw_policy, waste_curves
from closeranks.plan.policy_text import footer, headline, level_rows, percent, size, tables

HOUR = 3600.0
DEFAULT = policy_for(CheckpointScenario())
SITUATIONS = st.builds(
    CheckpointScenario,
    mtbf_s=st.floats(60.0, 1e7),
    length_s=st.floats(60.0, 1e7),
    step_s=st.floats(0.01, 100.0),
    state_bytes=st.floats(1e6, 1e13),
    stall_s=st.floats(0.001, 100.0),
    durable_s=st.floats(100.0, 1e3),
    restart_s=st.floats(0.1, 1e3),
    remote_bytes_per_s=st.one_of(st.just(0.0), st.floats(1e7, 1e11)),
    num_jobs=st.integers(1, 200),
    machine_loss=st.floats(0.0, 1.0),
    drag=st.floats(0.0, 0.1),
    is_preemptible=st.booleans(),
)


def parsed(table: str) -> CheckpointConfig:
    return CheckpointConfig.model_validate(tomllib.loads(table)["checkpoint"])


def test_the_default_is_a_day_on_preemptible_machines() -> None:
    local, store = DEFAULT.nesting.placed
    assert (local.level.name, store.level.name) == (LOCAL, STORE)
    assert 60 < local.period_s < 80
    assert store.period_s == pytest.approx(2 * local.period_s)
    assert DEFAULT.waste == pytest.approx(0.015, abs=0.001)
    config = parsed(checkpoint_table(DEFAULT))
    assert (config.every, config.mtbf, config.remote_every, config.resume) == ("auto", "3h", 2, "auto")
    assert config.remote.startswith("s3://")


def test_the_recommended_habit_is_the_best() -> None:
    *others, best = DEFAULT.habits
    assert best.name == "recommended"
    assert best.waste < min(habit.waste for habit in others)
    by_name = {habit.name: habit for habit in DEFAULT.habits}
    assert by_name["never"].waste > 0.99
    assert by_name["never"].lost_s == pytest.approx(3 * HOUR, rel=0.01)
    assert by_name["every step"].waste > 0.9  # the store cannot take 14 GB every second
    assert by_name["every 15 min"].waste < by_name["every 15 min, blocking"].waste


@given(SITUATIONS)
def test_every_situation_has_a_policy(situation: CheckpointScenario) -> None:
    policy = policy_for(situation)
    assert 0 <= policy.waste <= 1
    for habit in policy.habits:
        assert 0 <= habit.waste <= 1
        assert habit.takes_s >= situation.length_s * (1 - 1e-9)
    for crowd in policy.crowds:
        assert crowd.load <= 1 + 1e-6
        assert crowd.random_s <= crowd.aligned_s * (1 + 1e-9)
        assert crowd.waste <= crowd.aligned_waste + 1e-9
    config = parsed(checkpoint_table(policy))
    if config.every == "auto":
        assert seconds_of(config.mtbf) == pytest.approx(situation.mtbf_s, rel=0.01)
    else:
        assert seconds_of(str(config.every)) == pytest.approx(policy.nesting.period_s, rel=0.01)
    assert headline(policy)
    assert footer(policy).endswith(checkpoint_table(policy))
    for rows in (level_rows(policy), *(rows for _, _, rows in tables(policy))):
        assert len({len(row) for row in rows}) == 1


def test_what_auto_cannot_do_is_written_out() -> None:
    """A day's life and saves of ten minutes: auto would stop at half an hour."""
    policy = policy_for(CheckpointScenario(mtbf_s=24 * HOUR, stall_s=600.0, durable_s=600.0, machine_loss=0.0))
    assert policy.nesting.period_s > MAX_AUTO_S == MOST_S
    assert parsed(checkpoint_table(policy)).every != "auto"


def test_a_local_copy_that_does_not_pay_is_left_out() -> None:
    policy = policy_for(CheckpointScenario(machine_loss=0.98, remote_bytes_per_s=2e9))
    assert policy.nesting.dropped == (LOCAL,)
    config = parsed(checkpoint_table(policy))
    assert config.folder.startswith("s3://")
    assert not config.remote
    assert "left out" in footer(policy)


def test_one_place_only() -> None:
    policy = policy_for(CheckpointScenario(remote_bytes_per_s=0.0))
    assert len(policy.nesting.placed) == 1
    config = parsed(checkpoint_table(policy))
    assert not config.remote
    assert not config.folder


def test_more_jobs_save_less_often_and_lose_more() -> None:
    crowds = DEFAULT.crowds
    assert [crowd.num_jobs for crowd in crowds] == [1, 4, 16, 64]
    assert [crowd.waste for crowd in crowds] == sorted(crowd.waste for crowd in crowds)
    assert [crowd.period_s for crowd in crowds] == sorted(crowd.period_s for crowd in crowds)
    assert crowds[-1].aligned_waste > 1.5 * crowds[-1].waste
    assert [crowd.num_jobs for crowd in policy_for(CheckpointScenario(num_jobs=10)).crowds] == [1, 4, 10, 16, 64]


def test_a_patient_timeout_where_the_store_is_slow() -> None:
    slow = policy_for(CheckpointScenario(num_jobs=64, remote_bytes_per_s=0.1e9))
    assert parsed(checkpoint_table(slow)).timeout_s >= 4 * slow.nesting.placed[-1].level.durable_s
    assert "timeout_s" not in checkpoint_table(DEFAULT)


def test_storage_is_counted() -> None:
    local, store = DEFAULT.storage
    assert local.written_bytes == pytest.approx(14e9 * 24 * HOUR / DEFAULT.nesting.period_s)
    assert store.written_bytes == pytest.approx(local.written_bytes / 2)
    assert (local.cost, store.kept_bytes) == (0.0, 3 * 14e9)
    assert store.monthly_cost == pytest.approx(42 * 0.023)
    assert store.cost == pytest.approx(store.monthly_cost * 24 / 730)


def test_ages_are_for_preemptible_machines() -> None:
    assert len(DEFAULT.ages) == 5
    assert policy_for(CheckpointScenario(is_preemptible=False)).ages == ()
    assert "SIGTERM" in footer(DEFAULT)
    assert "SIGTERM" not in footer(policy_for(CheckpointScenario(is_preemptible=False)))


def test_the_notice_is_judged() -> None:
    assert "within a notice of 2 min" in footer(DEFAULT)
    assert "within a notice of 30 s and 2 min" in footer(policy_for(CheckpointScenario(remote_bytes_per_s=5e9)))
    assert "too late" in footer(policy_for(CheckpointScenario(remote_bytes_per_s=0.05e9)))


def test_curves_are_least_where_they_are_marked() -> None:
    curves = waste_curves(DEFAULT)
    assert [curve.name for curve in curves] == ["blocking", "asynchronous", "two levels"]
    for curve in curves:
        assert curve.best_waste <= min(curve.wastes) * 1.01
        lowest = curve.periods_s[curve.wastes.index(min(curve.wastes))]
        assert 0.6 < lowest / curve.best_s < 1.6
    level = single_level(DEFAULT.situation, is_blocking=True)
    assert curves[0].best_waste == waste(best_period_s(level), level)


@pytest.mark.parametrize(
    "situation",
    [
        CheckpointScenario(),
        CheckpointScenario(num_jobs=100),
        CheckpointScenario(remote_bytes_per_s=0.0, is_preemptible=False, mtbf_s=600.0),
        CheckpointScenario(machine_loss=0.98, remote_bytes_per_s=5e9, state_bytes=1e6, durable_s=0.1),
    ],
)
def test_every_picture_is_drawn_and_nothing_else_is_left(situation: CheckpointScenario, tmp_path: Path) -> None:
    path = draw_policy(policy_for(situation), tmp_path / "policy.png")
    head = path.read_bytes()[:24]
    assert head.startswith(b"\x89PNG")
    assert struct.unpack(">II", head[16:24]) == (1612, 819)
    assert [found.name for found in tmp_path.iterdir()] == ["policy.png"]


def test_words() -> None:
    assert [*map(percent, (0.0, 0.0034, 0.0202, 0.24, 0.9973, 0.99999, 1.0))] == [
        "0%", "0.34%", "2.0%", "24%", "99.7%", "over 99.9%", "100%",
    ]  # fmt: skip
    assert [*map(size, (512, 14e9, 8.67e12))] == ["512 B", "14 GB", "8.67 TB"]


def test_never_is_fine_where_nothing_fails() -> None:
    policy = policy_for(replace(CheckpointScenario(), mtbf_s=1e12))
    assert policy.habits[0].waste < 1e-3
    assert math.isfinite(policy.habits[0].takes_s)


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys, closeranks.plan.policy, closeranks.plan.policy_text, closeranks.plan.policy_picture;"
        "sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'matplotlib')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
