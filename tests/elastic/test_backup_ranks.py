"""Who holds the same, and who keeps whose copy: laws over all worlds."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from closeranks.elastic.backup_ranks import backup_ranks, images_of, layout_digest, survives_host_loss
from closeranks.facts.layout import Layout
from closeranks.facts.mesh import Mesh

worlds = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6)), min_size=1, max_size=14).map(
    lambda rows: ([host for host, _ in rows], [f"i{image}" for _, image in rows])
)


def test_replicas_hold_the_same_image() -> None:
    assert set(images_of(Mesh(Layout(data=4)))) == {"p0-s0-t0"}
    assert images_of(Mesh(Layout(data=3, zero=1))) == ("p0-s0-t0", "p0-s1-t0", "p0-s2-t0")
    assert images_of(Mesh(Layout(data=4, zero=3, shard=2))) == ("p0-s0-t0", "p0-s1-t0") * 2
    assert len(set(images_of(Mesh(Layout(data=2, tensor=2, pipeline=2))))) == 4
    assert images_of(Mesh(Layout(data=4), num_replica_groups=2)) == ("h0-p0-s0-t0",) * 2 + ("h1-p0-s0-t0",) * 2


def test_layouts_are_told_apart() -> None:
    digests = {layout_digest(Layout(data=2, zero=zero, schedule=name)) for zero in (1, 3) for name in ("1f1b", "zbv")}
    assert len(digests) == 4
    assert all(len(digest) == 16 for digest in digests)


def test_replicas_need_no_peer() -> None:
    assert backup_ranks([0, 0, 0], ["a", "a", "a"]) == (None, None, None)
    assert backup_ranks([0, 1], ["a", "a"]) == (None, None)
    assert backup_ranks([0, 0, 1, 1], ["a", "b", "a", "b"]) == (None,) * 4


def test_a_rank_alone_has_nobody() -> None:
    assert backup_ranks([0], ["a"]) == (None,)


def test_shards_go_to_another_host() -> None:
    assert backup_ranks([0, 0, 1, 1], ["a", "b", "c", "d"]) == (2, 3, 0, 1)
    assert backup_ranks([0, 0, 0], ["a", "b", "c"]) == (1, 2, 0)


def test_replicas_on_one_of_two_hosts_send_one_copy_away() -> None:
    assert backup_ranks([0, 0, 1, 1], ["a", "a", "b", "b"]) == (2, None, 0, None)


def test_a_host_larger_than_all_others_keeps_some_for_itself() -> None:
    found = backup_ranks([0, 0, 0, 1], ["a", "b", "c", "d"])
    assert sorted(keeper for keeper in found if keeper is not None) == [0, 1, 2, 3]
    assert sum(keeper == 3 for keeper in found[:3]) == 1
    assert found[3] in (0, 1, 2)


def test_of_a_host_larger_than_all_others_some_images_would_go_with_it() -> None:
    def spares(hosts: list[int], images: list[str]) -> bool:
        return survives_host_loss(hosts, images, backup_ranks(hosts, images))

    assert spares([0, 0, 1, 1], ["a", "b", "c", "d"])
    assert spares([0, 0, 0, 1], ["a", "a", "a", "a"])
    assert spares([0, 0], ["a", "b"]), "there is no other host to leave"
    assert not spares([0, 0, 0, 1], ["a", "b", "c", "d"])


@given(worlds)
def test_laws_of_partners(world: tuple[list[int], list[str]]) -> None:
    hosts, images = world
    found = backup_ranks(hosts, images)
    assert found == backup_ranks(hosts, images)
    counts = Counter(keeper for keeper in found if keeper is not None)
    assert all(count == 1 for count in counts.values())
    assert all(keeper != rank for rank, keeper in enumerate(found))
    several = len(set(hosts)) > 1
    for image in set(images):
        holders = [rank for rank, other in enumerate(images) if other == image]
        is_safe = len({hosts[r] for r in holders}) > 1 if several else len(holders) > 1
        kept = [rank for rank in holders if found[rank] is not None]
        assert kept == ([] if is_safe or len(hosts) == 1 else holders[:1])


@given(st.lists(st.integers(0, 3), min_size=2, max_size=12))
def test_shards_leave_their_host_as_often_as_can_be(hosts: list[int]) -> None:
    found = backup_ranks(hosts, [f"i{rank}" for rank in range(len(hosts))])
    assert None not in found
    num_away = sum(hosts[rank] != hosts[keeper] for rank, keeper in enumerate(found) if keeper is not None)
    largest = max(Counter(hosts).values())
    assert num_away == min(len(hosts), 2 * (len(hosts) - largest))
