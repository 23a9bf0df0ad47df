"""Which tests are slow is said in one place."""

from __future__ import annotations

import pytest

from tests.conftest import SLOW, UNMATCHED


def test_the_list_names_tests_that_are_there(pytestconfig: pytest.Config) -> None:
    """As far as they are collected, which all are where all are run."""
    assert pytestconfig.stash[UNMATCHED] == []


def test_the_list_is_in_order_and_says_nothing_twice() -> None:
    assert sorted(set(SLOW)) == SLOW
