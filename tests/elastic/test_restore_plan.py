"""Which copies a generation goes on from, over random losses."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from closeranks.capture.slots import SlotHeader
from closeranks.elastic.backup_ranks import backup_ranks
from closeranks.elastic.restore_plan import (
    OWN_FILES,
    PEER_FILES,
    RestorePlan,
    SnapshotCopy,
    SnapshotLocation,
    complete_states,
    is_in_place,
    plan_restore,
    rank_placements,
    slot_to_overwrite,
)

LAYOUT = "same"


def written(
    hosts: list[int], images: list[str], steps: list[tuple[int, ...]], generation: int = 0
) -> list[SnapshotCopy]:
    """What a generation leaves behind: of each rank the steps in its two slots; peers have the same."""
    seats, kept_by = rank_placements(hosts, images), backup_ranks(hosts, images)
    copies = []
    for rank, seat in enumerate(seats):
        for step in steps[rank]:
            about = SlotHeader(generation, step, seat.image, len(set(images)), LAYOUT, rank)
            copies.append(SnapshotCopy(SnapshotLocation(seat.host, seat.local_index, OWN_FILES[step % 2]), about))
            keeper = kept_by[rank]
            if keeper is not None:
                copies.append(
                    SnapshotCopy(
                        SnapshotLocation(seats[keeper].host, seats[keeper].local_index, PEER_FILES[step % 2]), about
                    )
                )
    return copies


def chosen(copies: list[SnapshotCopy], hosts: list[int], images: list[str]) -> RestorePlan | None:
    return plan_restore(copies, rank_placements(hosts, images), LAYOUT)


SHARDS = ["a", "b", "c", "d"]


def test_the_newest_step_that_everybody_has() -> None:
    copies = written([0] * 4, SHARDS, [(7, 8), (7, 8), (7,), (7, 8)])
    choice = chosen(copies, [0] * 4, SHARDS)
    assert choice is not None
    assert choice.step == 7
    assert choice.fetches == ()
    assert {choice.source_of(rank, 0) for rank in range(4)} == {"memory"}


def test_generations_are_never_mixed() -> None:
    """Steps may not repeat bit for bit where a device adds in any order."""
    old = written([0] * 4, SHARDS, [(8,), (8,), (), (8,)], generation=0)
    new = written([0] * 4, SHARDS, [(), (), (8,), ()], generation=1)
    before = written([0] * 4, SHARDS, [(7,)] * 4, generation=0)
    choice = chosen([*old, *new, *before], [0] * 4, SHARDS)
    assert choice is not None
    assert choice.state == (0, 7, 0)


def test_of_one_step_the_later_generation_counts() -> None:
    copies = written([0] * 4, SHARDS, [(7,)] * 4, 0) + written([0] * 4, SHARDS, [(7,)] * 4, 1)
    choice = chosen(copies, [0] * 4, SHARDS)
    assert choice is not None
    assert choice.state == (0, 7, 1)


def test_copies_of_another_session_are_left_alone() -> None:
    copies = [replace(c, about=replace(c.about, run=1)) for c in written([0] * 4, SHARDS, [(9,)] * 4)]
    assert chosen(copies, [0] * 4, SHARDS) is None


def test_a_lost_host_comes_back_from_its_peers() -> None:
    hosts = [0, 0, 1, 1]
    copies = [c for c in written(hosts, SHARDS, [(7, 8)] * 4) if c.location.host == 0]
    choice = chosen(copies, [0, 0, 2, 2], SHARDS)
    assert choice is not None
    assert choice.step == 8
    assert [(f.copy.about.image, f.host) for f in choice.fetches] == [("c", 2), ("d", 2)]
    assert {f.source for f in choice.fetches} == {0, 1}
    assert {f.target for f in choice.fetches} == {2, 3}
    assert [choice.source_of(rank, host) for rank, host in enumerate([0, 0, 2, 2])] == ["memory"] * 2 + ["peer"] * 2


def test_a_fresh_host_of_replicas_is_sent_one_copy() -> None:
    copies = [c for c in written([0, 0, 1, 1], ["a"] * 4, [(7, 8)] * 4) if c.location.host == 0]
    choice = chosen(copies, [0, 0, 2, 2], ["a"] * 4)
    assert choice is not None
    assert len(choice.fetches) == 1


def test_a_rank_reads_its_own_box_first() -> None:
    choice = chosen(written([0] * 3, ["a"] * 3, [(4,)] * 3), [0] * 3, ["a"] * 3)
    assert choice is not None
    assert [reads["a"].location.local_index for reads in choice.reads] == [0, 1, 2]


def test_after_a_resize_every_rank_reads_every_image() -> None:
    copies = written([0] * 4, SHARDS, [(7, 8)] * 4)
    choice = plan_restore(copies, rank_placements([0, 0], ["a", "b"]), "another")
    assert choice is not None
    assert not choice.is_same_layout
    assert [sorted(reads) for reads in choice.reads] == [SHARDS, SHARDS]


def test_nothing_is_copied_anew_where_all_is_in_place() -> None:
    hosts, kept_by = [0] * 4, backup_ranks([0] * 4, SHARDS)
    copies = written(hosts, SHARDS, [(7, 8)] * 4)
    choice = chosen(copies, hosts, SHARDS)
    assert choice is not None
    assert is_in_place(choice, copies, rank_placements(hosts, SHARDS), kept_by)
    for lost in (c for c in copies if c.about.step == 8):
        assert not is_in_place(choice, [c for c in copies if c != lost], rank_placements(hosts, SHARDS), kept_by)


def test_what_the_run_goes_on_from_is_not_written_over() -> None:
    hosts = [0] * 4
    copies = written(hosts, SHARDS, [(7, 8)] * 4)
    seat = rank_placements(hosts, SHARDS)[1]
    assert slot_to_overwrite(copies, (0, 8, 0), seat, OWN_FILES) == OWN_FILES[1]
    assert slot_to_overwrite(copies, (0, 7, 0), seat, OWN_FILES) == OWN_FILES[0]
    assert slot_to_overwrite(copies, (0, 8, 0), seat, PEER_FILES) == PEER_FILES[1]
    assert slot_to_overwrite(copies, None, seat, OWN_FILES) == OWN_FILES[0]


worlds = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), min_size=1, max_size=8).map(
    lambda rows: ([h for h, _ in rows], [f"i{i}" for _, i in rows])
)


@given(worlds, st.data())
def test_laws_over_random_losses(world: tuple[list[int], list[str]], data: st.DataObject) -> None:
    """Ranks die in the middle of writing step 8; slots and whole hosts are lost at random."""
    hosts, images = world
    steps = [data.draw(st.sampled_from([(7,), (7, 8)])) for _ in hosts]
    copies = written(hosts, images, steps)
    copies = [c for c in copies if data.draw(st.integers(0, 9)) > 1]
    gone = data.draw(st.sampled_from([None, 0, 1, 2]))
    copies = [c for c in copies if c.location.host != gone]
    now = [3 if host == gone else host for host in hosts]
    choice = chosen(copies, now, images)
    whole = [step for step in (8, 7) if {c.about.image for c in copies if c.about.step == step} == set(images)]
    assert [state[1] for state in complete_states(copies, 0)] == whole
    if not whole:
        assert choice is None
        return
    assert choice is not None
    assert choice.step == whole[0]
    for rank, reads in enumerate(choice.reads):
        (copy,) = reads.values()
        assert copy in copies
        assert (copy.about.image, copy.about.step) == (images[rank], whole[0])
        is_here = any(c.location.host == now[rank] and c.about == copy.about for c in copies)
        fetched = [f for f in choice.fetches if f.host == now[rank] and f.copy.about.image == images[rank]]
        assert (copy.location.host == now[rank]) or not is_here
        assert len(fetched) == (copy.location.host != now[rank])
    for fetch in choice.fetches:
        assert now[fetch.target] == fetch.host != fetch.copy.location.host == now[fetch.source]


@given(worlds)
def test_any_one_kill_of_workers_leaves_a_whole_state(world: tuple[list[int], list[str]]) -> None:
    """Every rank has sealed step 7, and any of them step 8: whoever dies, step 7 is whole, or step 8."""
    hosts, images = world
    for cut in range(len(hosts) + 1):
        steps: list[tuple[int, ...]] = [(7, 8) if rank < cut else (7,) for rank in range(len(hosts))]
        choice = chosen(written(hosts, images, steps), hosts, images)
        assert choice is not None
        assert choice.step in (7, 8)


@given(worlds)
def test_the_loss_of_any_one_host_leaves_a_whole_state(world: tuple[list[int], list[str]]) -> None:
    hosts, images = world
    kept_by = backup_ranks(hosts, images)
    for gone in set(hosts):
        copies = [c for c in written(hosts, images, [(7,)] * len(hosts)) if c.location.host != gone]
        only_here = {images[r] for r, h in enumerate(hosts) if h == gone} - {
            images[r] for r, h in enumerate(hosts) if h != gone
        }
        crowded = any(
            kept_by[images.index(image)] is None or hosts[kept_by[images.index(image)] or 0] == gone
            for image in only_here
        )
        assert (not complete_states(copies, 0)) == crowded
