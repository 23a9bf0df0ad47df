"""The bucket plan is a pure function of the parameters: order, coverage, caps, slices."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from closeranks.sync.reducers.buckets import BucketMember, GradientBucket, plan_buckets

rows = st.lists(
    st.builds(
        lambda numel, dtype, stage, is_primary, partial_over, row, is_exact: BucketMember(
            "", numel * row, *dtype, stage, is_primary, partial_over, row, is_exact
        ),
        st.integers(1, 5000),
        st.sampled_from([("float32", 4), ("float64", 8), ("bfloat16", 2)]),
        st.integers(0, 2),
        st.booleans(),
        st.sampled_from([(), (), (0,), (1,), (0, 1)]),
        st.sampled_from([1, 1, 1, 9]),
        st.booleans(),
    ),
    max_size=40,
)
caps = st.integers(1, 20_000)


def named(members: list[BucketMember]) -> list[BucketMember]:
    fields = ("numel", "dtype", "element_bytes", "stage", "is_primary", "partial_over", "row", "is_exact")
    return [
        BucketMember(f"p{i:02d}", *(getattr(member, field) for field in fields)) for i, member in enumerate(members)
    ]


@given(rows, caps, caps)
def test_every_parameter_travels_exactly_once(members: list[BucketMember], cap: int, first_cap: int) -> None:
    plan = plan_buckets(named(members), cap_bytes=cap, first_cap_bytes=first_cap)
    assert sorted(number for bucket in plan for number in bucket.members) == list(range(len(members)))


@given(rows, caps, st.sampled_from([1, 2, 3, 8]), st.sampled_from([1, 16]))
def test_members_are_alike_and_have_their_places(
    members: list[BucketMember], cap: int, shards: int, align: int
) -> None:
    plan = plan_buckets(named(members), cap_bytes=cap, first_cap_bytes=cap, num_shards=shards, align_bytes=align)
    for bucket in plan:
        inside = [members[number] for number in bucket.members]
        kind = (bucket.dtype, bucket.is_primary, bucket.partial_over, bucket.stage, bucket.is_exact)
        assert {m.kind for m in inside} == {kind}
        assert len(inside) == 1 or sum(m.num_bytes for m in inside) <= cap
        step = max(align // inside[0].element_bytes, 1)
        ends = [offset + m.numel for offset, m in zip(bucket.offsets, inside, strict=True)]
        assert bucket.offsets[0] == 0
        assert all(offset % step == 0 for offset in bucket.offsets)
        assert all(0 <= after - end < step for end, after in zip(ends, bucket.offsets[1:], strict=False))
        unit = shards * (inside[0].row if inside[0].row > 1 else step)
        assert 0 <= bucket.numel - ends[-1] < unit
        assert bucket.numel % unit == 0, "slices are equal, and part no row"
        assert len(inside) == 1 or all(m.row == 1 for m in inside)


@given(rows, caps)
def test_buckets_leave_as_backward_fills_them(members: list[BucketMember], cap: int) -> None:
    plan = plan_buckets(named(members), cap_bytes=cap, first_cap_bytes=cap)
    for before, after in pairwise(plan):
        assert (before.stage, min(before.members)) > (after.stage, min(after.members)), "last stage, then last filled"


@given(rows, caps)
def test_the_plan_does_not_depend_on_the_number_of_shards(members: list[BucketMember], cap: int) -> None:
    plans = {
        tuple(
            (b.members, b.offsets)
            for b in plan_buckets(named(members), cap_bytes=cap, first_cap_bytes=cap, num_shards=n)
        )
        for n in (1, 3, 64)
    }
    assert len(plans) == 1


def kept(plan: tuple[GradientBucket, ...], members: list[BucketMember]) -> list[object]:
    """Which names lie where, in the buckets that are summed over the group 0."""
    return [
        ([members[number].name for number in bucket.members], bucket.offsets, bucket.numel)
        for bucket in plan
        if bucket.partial_over == (0,)
    ]


@given(rows, rows, st.lists(st.integers(1, 500), min_size=1, max_size=6), caps, caps, st.data())
def test_what_two_stages_share_lies_at_the_same_place_on_both(
    one: list[BucketMember], other: list[BucketMember], shared: list[int], cap: int, first_cap: int, data: st.DataObject
) -> None:
    plans = []
    for stage, own in ((0, one), (3, other)):
        tied = [
            BucketMember(f"tied{i}", numel, "float32", 4, stage, stage == 0, partial_over=(0,))
            for i, numel in enumerate(shared)
        ]
        rest = [member for member in named(own) if member.partial_over != (0,)]
        mixed = data.draw(st.permutations([*tied, *rest]))
        plan = plan_buckets(mixed, cap_bytes=cap, first_cap_bytes=first_cap, num_shards=4, align_bytes=16)
        plans.append(sorted(kept(plan, mixed), key=str))
    assert plans[0] == plans[1]


def test_last_parameters_leave_first() -> None:
    members = [BucketMember(name, 10, "float32", 4) for name in "abcd"]
    plan = plan_buckets(members, cap_bytes=80, first_cap_bytes=40)
    assert [bucket.members for bucket in plan] == [(3,), (2, 1), (0,)]


def test_the_first_bucket_of_each_stage_is_small() -> None:
    members = [BucketMember(name, 10, "float32", 4, stage) for stage, name in ((0, "a"), (0, "b"), (2, "c"), (2, "d"))]
    plan = plan_buckets(members, cap_bytes=80, first_cap_bytes=40)
    assert [bucket.members for bucket in plan] == [(3,), (2,), (1,), (0,)]


def test_norms_of_all_blocks_hold_nobody_back() -> None:
    """Summed over a further group they travel together, which they can only when the first block is done."""
    members = [
        BucketMember(f"{block}.{kind}", 10, "float32", 4, partial_over=(0,) if kind == "norm" else ())
        for block in range(3)
        for kind in ("norm", "weight")
    ]
    plan = plan_buckets(members, cap_bytes=40, first_cap_bytes=40)
    assert [bucket.members for bucket in plan if not bucket.partial_over] == [(5,), (3,), (1,)]
    plan = plan_buckets(members, cap_bytes=1000, first_cap_bytes=40)
    assert [bucket.members for bucket in plan] == [(5,), (3, 1), (0, 2, 4)]
