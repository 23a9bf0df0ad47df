"""The bucket plan is a pure function of the parameters: order, coverage, caps."""

from hypothesis import given
from hypothesis import strategies as st

from closeranks.sync.buckets import Member, plan_buckets

members = st.lists(
    st.tuples(st.integers(1, 5000), st.sampled_from([("float32", 4), ("float64", 8), ("bfloat16", 2)])), max_size=40
).map(lambda rows: [Member(f"p{i}", numel, *dtype) for i, (numel, dtype) in enumerate(rows)])


@given(members, st.integers(1, 20_000), st.integers(1, 20_000))
def test_every_parameter_travels_exactly_once(rows: list[Member], cap: int, first_cap: int) -> None:
    plan = plan_buckets(rows, num_ranks=4, cap_bytes=cap, first_cap_bytes=first_cap)
    assert sorted(name for bucket in plan for name in bucket.names) == sorted(m.name for m in rows)


@given(members, st.integers(1, 20_000))
def test_buckets_keep_the_cap_and_one_dtype(rows: list[Member], cap: int) -> None:
    by_name = {m.name: m for m in rows}
    for bucket in plan_buckets(rows, num_ranks=2, cap_bytes=cap, first_cap_bytes=cap):
        inside = [by_name[name] for name in bucket.names]
        assert {m.dtype for m in inside} == {bucket.dtype}
        assert len(inside) == 1 or sum(m.numel * m.element_bytes for m in inside) <= cap
        ends = [offset + m.numel for offset, m in zip(bucket.offsets, inside, strict=True)]
        assert list(bucket.offsets) == [0, *ends[:-1]]
        assert bucket.numel == ends[-1]


@given(members, st.integers(1, 20_000))
def test_the_plan_does_not_depend_on_the_number_of_ranks(rows: list[Member], cap: int) -> None:
    plans = {plan_buckets(rows, num_ranks=n, cap_bytes=cap, first_cap_bytes=cap) for n in (2, 3, 64)}
    assert len(plans) == 1


def test_last_parameters_leave_first() -> None:
    rows = [Member(name, 10, "float32", 4) for name in "abcd"]
    plan = plan_buckets(rows, num_ranks=2, cap_bytes=80, first_cap_bytes=40)
    assert [bucket.names for bucket in plan] == [("d",), ("c", "b"), ("a",)]


def test_a_group_of_one_sends_nothing() -> None:
    assert plan_buckets([Member("a", 1, "float32", 4)], num_ranks=1, cap_bytes=1, first_cap_bytes=1) == ()
