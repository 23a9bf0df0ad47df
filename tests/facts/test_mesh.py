"""Where ranks stand: places are a bijection, groups part the ranks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from closeranks.facts.layout import Layout
from closeranks.facts.mesh import AXES, Mesh, MeshCoordinate

SIZES = st.sampled_from([1, 2, 3, 4])
MESHES = st.builds(
    lambda replicas, shards, tensor, pipeline: Mesh(
        Layout(data=replicas * shards, zero=3, shard=shards, tensor=tensor, pipeline=pipeline)
    ),
    SIZES,
    SIZES,
    SIZES,
    SIZES,
)


@given(mesh=MESHES)
def test_place_and_rank_are_inverse(mesh: Mesh) -> None:
    ranks = range(mesh.layout.num_ranks)
    assert [mesh.rank_of(mesh.coordinate(rank)) for rank in ranks] == list(ranks)


@given(mesh=MESHES, axis=st.sampled_from(AXES))
def test_groups_of_an_axis_part_the_ranks(mesh: Mesh, axis: str) -> None:
    groups = mesh.groups(axis)
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.layout.num_ranks))
    size = mesh.sizes[AXES.index(axis)]
    for group in groups:
        assert len(group) == size
        assert [getattr(mesh.coordinate(rank), axis) for rank in group] == list(range(size))


def test_the_order_of_axes() -> None:
    mesh = Mesh(Layout(data=2, tensor=2, pipeline=2))
    assert mesh.coordinate(5) == MeshCoordinate(pipeline=1, replica=0, shard=0, tensor=1)
    assert mesh.group_of(5, "tensor") == (4, 5)
    assert mesh.group_of(5, "replica") == (5, 7)
    assert mesh.group_of(5, "pipeline") == (1, 5)


@pytest.mark.parametrize(("zero", "shard", "sizes"), [(0, 0, (1, 4, 1, 1)), (3, 0, (1, 1, 4, 1)), (1, 2, (1, 2, 2, 1))])
def test_without_zero_all_data_ranks_are_replicas(zero: int, shard: int, sizes: tuple[int, ...]) -> None:
    mesh = Mesh(Layout(data=4, zero=zero, shard=shard))
    assert mesh.sizes == sizes
    assert mesh.group_of(2, "replica", "shard") == (0, 1, 2, 3)
