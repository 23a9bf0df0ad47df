"""Ranking, rules that fail, rules of the user, and what is said to be unknown."""

from __future__ import annotations

from collections.abc import Iterator

from closeranks.doctor.diagnose import diagnose
from closeranks.doctor.finding import Finding
from closeranks.doctor.run_facts import RunFacts
from tests.doctor.made import even, facts


def _own(made: RunFacts) -> Iterator[Finding]:
    if made.mean_s("tokenize") > 0:
        yield Finding("slow-tokenizer", "The tokenizer is slow.", ("seen",), "Tokenize once.", gain=0.9)


def _broken(made: RunFacts) -> Iterator[Finding]:
    raise KeyError("tokenize")
    yield


def test_the_largest_gain_comes_first() -> None:
    made = facts({"user_code": 0.05, "save": 0.2}, settings={"checkpoint": {"every": 1}})
    gains = [one.gain for one in diagnose(made).findings]
    assert len(gains) == 2
    assert gains == sorted(gains, reverse=True)


def test_small_buckets_explain_exposed_communication() -> None:
    made = facts(*even({"data.all_reduce": 0.1}), started={"bucket_mib": 0.01, "num_trainable": 1_000_000})
    assert [one.cause for one in diagnose(made).findings] == ["small-collectives"]


def test_a_rule_of_the_user() -> None:
    made = facts({"tokenize": 0.3})
    assert [one.cause for one in diagnose(made, {"own": _own}).findings] == ["slow-tokenizer"]
    assert diagnose(made).findings == ()


def test_a_rule_that_raises_is_named_and_stops_no_other() -> None:
    diagnosis = diagnose(facts({"user_code": 0.2}), {"broken": _broken})
    assert [one.cause for one in diagnosis.findings] == ["user-code"]
    assert diagnosis.failed_rules == ("broken: KeyError: 'tokenize'",)


def test_what_was_not_recorded_is_said() -> None:
    assert "no rank recorded" in diagnose(RunFacts()).missing[0]
    assert "only 3 steps" in diagnose(facts([{}] * 3)).missing[0]
    assert diagnose(facts()).missing == ()
