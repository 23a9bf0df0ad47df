"""Whether advice was followed, and whether it helped as predicted."""

from __future__ import annotations

import pytest

from closeranks.doctor.diagnose import diagnose
from closeranks.doctor.run_comparison import compare_runs, comparison_text
from tests.doctor.made import facts

SLOW = facts({"data": 0.1}, settings={"data": {"workers": 0}, "run": {"folder": "a"}}, done={"data_read_s": 0.2})
FAST = facts({"data": 0.001}, settings={"data": {"workers": 3}, "run": {"folder": "b"}}, done={"data_read_s": 0.2})


def test_advice_that_helped() -> None:
    compared = compare_runs(SLOW, FAST, diagnose(SLOW).findings, diagnose(FAST).findings)
    assert compared.changed == ("data.workers: 0 -> 3",)
    assert [(one.is_followed, one.is_gone) for one in compared.advice] == [(True, True)]
    assert compared.measured == pytest.approx(0.2 / 0.101)
    assert compared.expected == pytest.approx(2.0, rel=0.02)
    text = comparison_text(("a", "b"), compared)
    assert "b is 1.98 times as fast as a" in text
    assert "expected 2.00 times" in text
    assert "gone        input-bound (advice followed)" in text


def test_advice_that_was_not_followed_predicts_nothing() -> None:
    compared = compare_runs(SLOW, SLOW, diagnose(SLOW).findings, diagnose(SLOW).findings)
    assert (compared.changed, compared.expected, compared.measured) == ((), 1.0, 1.0)
    assert [(one.is_followed, one.is_gone) for one in compared.advice] == [(False, False)]


def test_a_new_finding_is_named() -> None:
    worse = facts({"user_code": 0.2})
    compared = compare_runs(FAST, worse, diagnose(FAST).findings, diagnose(worse).findings)
    assert [one.cause for one in compared.new] == ["user-code"]
