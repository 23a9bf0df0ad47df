from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from closeranks.data.files.eviction import (
    PREFETCH_TTL_S,
    CachedFile,
    cached_file,
    eviction_order,
    mark_prefetched,
    mark_used,
)

NOW = 10_000.0
NAMES = st.lists(st.sampled_from([f"file-{letter}" for letter in "abcdefgh"]), unique=True)
FILES = NAMES.flatmap(
    lambda names: st.tuples(
        *(
            st.builds(
                CachedFile, st.just(name), st.integers(0, 100), st.floats(NOW - 2 * PREFETCH_TTL_S, NOW), st.booleans()
            )
            for name in names
        )
    )
)


@given(files=FILES, wanted=NAMES)
def test_what_is_needed_now_may_take_the_place_of_anything(files: tuple[CachedFile, ...], wanted: list[str]) -> None:
    order = eviction_order(files, wanted, NOW, is_prefetch=False)
    assert sorted(order, key=repr) == sorted(files, key=repr)


@given(files=FILES, wanted=NAMES)
def test_what_is_fetched_ahead_spares_all_that_is_needed_sooner(
    files: tuple[CachedFile, ...], wanted: list[str]
) -> None:
    order = eviction_order(files, wanted, NOW, is_prefetch=True)
    assert not {file.name for file in order} & set(wanted)
    assert all(file.was_used or NOW - file.stamped_at >= PREFETCH_TTL_S for file in order)
    assert order == eviction_order(files, wanted, NOW, is_prefetch=False)[: len(order)], "the same go first either way"
    assert order == sorted(order, key=lambda file: file.stamped_at), "used longest ago, first to go"


@given(files=FILES, wanted=NAMES)
def test_of_what_is_needed_that_needed_latest_goes_first(files: tuple[CachedFile, ...], wanted: list[str]) -> None:
    first = len(eviction_order(files, wanted, NOW, is_prefetch=True))
    rest = eviction_order(files, wanted, NOW, is_prefetch=False)[first:]
    assert [file.stamped_at for file in rest] == sorted((file.stamped_at for file in rest), reverse=True)


def test_stamps_say_whether_a_file_was_used(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"123")
    with path.open("rb") as file:
        mark_prefetched(file.fileno())
        before = cached_file("file", path.stat())
        assert (before.num_bytes, before.was_used) == (3, False)
        mark_used(file.fileno())
        after = cached_file("file", path.stat())
        assert after.was_used
        assert after.stamped_at >= before.stamped_at
