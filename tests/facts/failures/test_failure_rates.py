"""Failure rates: the built-in tables against what was published, and the user's own."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from closeranks.core.errors import UserError
from closeranks.facts.failures.failure_rates import FailureTable, load_failures, parse_failures, table_names

LLAMA_HOURS = 16384 * 54 * 24


def test_every_built_in_table_names_its_source() -> None:
    assert table_names() == ("llama3", "research", "spot")
    for name in table_names():
        table = load_failures(name)
        assert table.source
        assert table.date.startswith("20")


def test_the_counts_of_llama_3_are_those_of_its_paper() -> None:
    """arXiv 2407.21783: 466 interruptions in 54 days on 16,384 GPUs, 419 of them unexpected; 148 by faulty GPUs, 72 by
    HBM3, 35 by network switches and cables, 6 by silent corruption; about one unexpected interruption in 3 hours."""
    kinds = {kind.kind: kind for kind in load_failures("llama3").kinds}
    assert sum(kind.count for kind in kinds.values()) == 466
    assert sum(kind.count for kind in kinds.values() if not kind.notice_s) == 419
    assert [kinds[name].count for name in ("gpu", "hbm", "network", "silent corruption")] == [148, 72, 35, 6]
    assert {kind.device_hours for kind in kinds.values()} == {LLAMA_HOURS}
    unexpected = FailureTable(tuple(kind for kind in kinds.values() if not kind.notice_s))
    assert unexpected.mtbf_s(16384) == pytest.approx(54 * 86400 / 419)


def test_the_research_fleet_fails_every_7_9_hours_at_1024() -> None:
    """arXiv 2410.21680: mean time to failure 7.9 h at 1,024 GPUs. So 1,000 devices fail 2.97 times a day, in the range
    of one to three that is quoted for clusters of that size, and twice the devices fail twice as often."""
    table = load_failures("research")
    assert table.mtbf_s(1024) == pytest.approx(7.9 * 3600)
    assert table.mtbf_s(2048) == pytest.approx(7.9 * 1800)
    assert 86400 / table.mtbf_s(1000) == pytest.approx(24 / 7.9 * 1000 / 1024)
    assert 1 <= 86400 / table.mtbf_s(1000) <= 3


def test_preemptions_come_every_11_minutes_on_64_gpus() -> None:
    """PCcheck (ASPLOS 2025) cites 127 preemptions in 24 hours on 64 GPUs."""
    assert load_failures("spot").mtbf_s(64) == pytest.approx(86400 / 127)


def test_a_table_may_extend_another(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'extends = "llama3"\ndevice_hours = 1000\n'
        '[[failure]]\nkind = "gpu"\ncount = 0\n'
        '[[failure]]\nkind = "hbm"\ncount = 5\ndevice_hours = 2000\nhosts = 2\nrepair_h = 3\n'
        '[[failure]]\nkind = "slow clock"\ncount = 2\nshows = "slow"\nslowdown = 1.3\n'
    )
    kinds = {kind.kind: kind for kind in load_failures(str(path)).kinds}
    assert "gpu" not in kinds
    assert kinds["hbm"].per_device_hour == 5 / 2000
    assert (kinds["hbm"].hosts, kinds["hbm"].repair_h) == (2, 3.0)
    assert (kinds["slow clock"].per_device_hour, kinds["slow clock"].slowdown) == (0.002, 1.3)
    assert kinds["software"].per_device_hour == 54 / LLAMA_HOURS


def test_without_failures_nothing_ever_fails() -> None:
    assert math.isinf(parse_failures({}).mtbf_s(1000))


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("rate = 3", "'rate' is none of"),
        ("failure = 3", "failure must be a list"),
        ('[[failure]]\nkind = " "', "every [[failure]] needs a kind"),
        ('[[failure]]\nkind = "gpu"\ncount = 1', "needs device_hours above 0"),
        ('device_hours = 0\n[[failure]]\nkind = "gpu"\ncount = 1', "needs device_hours above 0"),
        ('device_hours = 9\n[[failure]]\nkind = "gpu"', "needs count"),
        ('device_hours = 9\n[[failure]]\nkind = "gpu"\ncount = -1', "needs count"),
        ('device_hours = 9\n[[failure]]\nkind = "gpu"\ncount = nan', "needs count"),
        ('device_hours = 9\n[[failure]]\nkind = "gpu"\ncount = 1\nhost = 1', "has an unknown key 'host'"),
        ('device_hours = 9\n[[failure]]\nkind = "gpu"\ncount = 1\nhosts = -1', "hosts of the failure 'gpu'"),
        ('device_hours = 9\n[[failure]]\nkind = "gpu"\ncount = 1\nshows = "loud"', "must be one of crash, hang, slow"),
        ('device_hours = 9\n[[failure]]\nkind = "gpu"\ncount = 1\nslowdown = 0.5', "slowdown of the failure 'gpu'"),
        ('device_hours = 9\n[[failure]]\nkind = "gpu"\ncount = 1\nrepair_h = -1', "repair_h of the failure 'gpu'"),
        ("device_hours = 9" + 2 * '\n[[failure]]\nkind = "gpu"\ncount = 1', "the kind 'gpu' occurs twice"),
        ('extends = "nobody"', "extends must be one of"),
        ("device_hours = ", "cannot be used"),
    ],
)
def test_a_table_that_cannot_be_used_is_refused_in_one_sentence(text: str, what: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(UserError) as refused:
        load_failures(str(path))
    assert what in str(refused.value)
    assert str(path) in str(refused.value)


def test_a_table_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read: No such file"):
        load_failures(str(tmp_path / "none.toml"))
    with pytest.raises(
        UserError, match=r"no table of failures 'lama3'\. Name one of llama3, research, spot, or a file"
    ):
        load_failures("lama3")
