from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from closeranks.core.errors import DataError
from closeranks.data.loading.quarantine import BadSample, Quarantine, merge

bad_samples = st.lists(st.builds(BadSample, st.integers(0, 20), st.just("'a', byte 3"), st.sampled_from("xyz")))


@given(bad_samples)
def test_what_is_merged_does_not_depend_on_who_found_it_first(found: list[BadSample]) -> None:
    merged = merge(found)
    assert merge(reversed(found)) == merged
    assert [bad.sample for bad in merged] == sorted({bad.sample for bad in found})


@given(bad_samples, bad_samples)
def test_state_comes_back_whole(before: list[BadSample], after: list[BadSample]) -> None:
    quarantine = Quarantine(5, before)
    fresh = quarantine.add(after)
    assert {bad.sample for bad in fresh}.isdisjoint(bad.sample for bad in before)
    again = Quarantine(5, [BadSample(99, "", "stale")])
    again.load(json.loads(json.dumps(quarantine.state())))
    assert again.samples == quarantine.samples
    assert again.by_sample() == quarantine.by_sample()
    assert len(again) == len({bad.sample for bad in before + after})


def test_a_sample_keeps_its_first_reason() -> None:
    quarantine = Quarantine(5, [BadSample(3, "", "torn")])
    assert quarantine.add([BadSample(3, "", "missing"), BadSample(4, "", "missing")]) == (BadSample(4, "", "missing"),)
    assert quarantine.by_sample()[3].reason == "torn"
    assert 3 in quarantine
    assert 5 not in quarantine


def test_the_ceiling_is_the_last_number_allowed() -> None:
    quarantine = Quarantine(2, [BadSample(1, "'a', byte 0", "torn"), BadSample(2, "", "NaN")])
    quarantine.check(7)
    assert not quarantine.exceeds_limit
    quarantine.add([BadSample(number, "", "NaN") for number in (5, 6)])
    assert quarantine.exceeds_limit
    with pytest.raises(DataError) as caught:
        quarantine.check(7)
    assert str(caught.value) == (
        "4 bad samples were skipped, more than data.max_bad = 2 (sample 1: torn ('a', byte 0); sample 2: NaN; "
        "sample 5: NaN; and 1 more) (step 7). Fix the data, or raise data.max_bad to let the run skip more of it."
    )


def test_a_place_is_told_once() -> None:
    assert BadSample(1, "'a', byte 0", "torn").message == "torn ('a', byte 0)"
    assert BadSample(1, "'a', byte 0", "'a', byte 0: torn").message == "'a', byte 0: torn"
    assert BadSample(1, "", "torn").message == "torn"
    damaged = "'a' is damaged: block 3, bytes 0 to 99"
    assert BadSample(1, "'a', byte 7", damaged).message == f"{damaged} (byte 7)"
    assert BadSample(1, "'a'", damaged).message == damaged
    assert BadSample(1, "sample 4 of web, 'a', byte 7", damaged).message == f"{damaged} (sample 4 of web, byte 7)"
    assert BadSample(1, "'b', byte 7", damaged).message == f"{damaged} ('b', byte 7)"
