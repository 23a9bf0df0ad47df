from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from closeranks.core.seeds import derive_seed

# Any text, and much of what a separator could be confused with.
NAME = st.text(st.characters(exclude_categories=["Cs"]), max_size=6) | st.text("\x1e\x1fsi01", max_size=6)
COORDINATES = st.lists(st.integers() | NAME, max_size=4)


def test_seeds_never_change_between_versions() -> None:
    """A checkpoint resumed by a later version must draw the same masks."""
    assert derive_seed(0) == 6450899586159507901
    assert derive_seed(1, "order", 2) == 7355567169899867350


@given(COORDINATES)
def test_a_seed_fits_63_bits_and_repeats(coordinates: list[int | str]) -> None:
    seed = derive_seed(*coordinates)
    assert 0 <= seed < 2**63
    assert derive_seed(*coordinates) == seed


@given(COORDINATES, COORDINATES)
def test_different_places_have_different_streams(one: list[int | str], other: list[int | str]) -> None:
    assert (derive_seed(*one) == derive_seed(*other)) == (one == other)


def test_neither_type_nor_grouping_is_confused() -> None:
    seeds = {derive_seed(1), derive_seed("1"), derive_seed(1, 1), derive_seed(11), derive_seed("1", "1"), derive_seed()}
    assert len(seeds) == 6
