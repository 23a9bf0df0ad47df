from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

from closeranks.core.errors import UserError
from closeranks.facts.layout import SCHEDULES
from closeranks.facts.pipeline.actions import Action, ActionKind
from closeranks.facts.pipeline.schedules import PipelineSchedule, schedule_for
from closeranks.facts.pipeline.timeline import peak_in_flight, timeline

names = st.sampled_from(sorted(SCHEDULES))
ranks = st.integers(1, 8)
micros = st.integers(1, 20)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpipe", ["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2"]),
        ("1f1b", ["0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"]),
        (
            "looped-bfs",
            ["0F0 0F1 0F2 2F0 2F1 2F2 2B0 2B1 2B2 0B0 0B1 0B2", "1F0 1F1 1F2 3F0 3F1 3F2 3B0 3B1 3B2 1B0 1B1 1B2"],
        ),
    ],
)
def test_the_plain_orders_word_for_word(name: str, expected: list[str]) -> None:
    assert str(schedule_for(name, 2, 3)).splitlines() == [name, *expected]


@given(names, ranks, micros)
def test_a_schedule_is_read_back_from_its_text(name: str, num_ranks: int, num_micro: int) -> None:
    schedule = schedule_for(name, num_ranks, num_micro)
    assert PipelineSchedule.parse(str(schedule)) == schedule


@given(names, ranks, micros)
def test_each_stage_takes_its_micro_batches_in_ascending_order(name: str, num_ranks: int, num_micro: int) -> None:
    """So that gradients are summed in the order of one process; a whole backward counts for both of its parts."""
    for actions in schedule_for(name, num_ranks, num_micro).ranks:
        for stage in {action.stage for action in actions}:
            for kinds in ("F", "BI", "BW"):
                order = [action.micro for action in actions if action.stage == stage and action.kind in kinds]
                assert order == list(range(num_micro))


def test_only_the_zero_bubble_family_splits_backwards() -> None:
    kinds = {name: {a.kind for row in schedule_for(name, 4, 10).ranks for a in row} for name in SCHEDULES}
    split = {"F", "I", "W"}
    whole = {"F", "B"}
    assert kinds == {
        "gpipe": whole, "1f1b": whole, "interleaved-1f1b": whole, "looped-bfs": whole,
        "interleaved-zero-bubble": split, "zbv": split, "dualpipev": split | whole,
    }  # fmt: skip


def test_what_cannot_be_scheduled_is_refused() -> None:
    with pytest.raises(UserError, match=r"no schedule 'zbw'.*zbv"):
        schedule_for("zbw", 2, 4)
    with pytest.raises(UserError, match="0 micro-batches"):
        schedule_for("1f1b", 2, 0)
    with pytest.raises(UserError, match="0 ranks"):
        schedule_for("1f1b", 0, 4)


PUBLISHED = {
    "interleaved-1f1b": torch_schedules.ScheduleInterleaved1F1B,
    "looped-bfs": torch_schedules.ScheduleLoopedBFS,
    "interleaved-zero-bubble": torch_schedules.ScheduleInterleavedZeroBubble,
    "zbv": torch_schedules.ScheduleZBVZeroBubble,
    "dualpipev": torch_schedules.ScheduleDualPipeV,
}
COMPUTES: dict[object, ActionKind] = {
    torch_schedules._ComputationType.FORWARD: "F",
    torch_schedules._ComputationType.FULL_BACKWARD: "B",
    torch_schedules._ComputationType.BACKWARD_INPUT: "I",
    torch_schedules._ComputationType.BACKWARD_WEIGHT: "W",
}


def published(name: str, num_ranks: int, num_micro: int) -> PipelineSchedule | None:
    """torch's own order, made without a process group; None where torch refuses the number of micro-batches."""
    num_rounds = max(1, num_micro // num_ranks)
    is_refused = num_micro % num_rounds if name.startswith("interleaved") else num_micro < 2 * num_ranks
    if is_refused and name not in ("looped-bfs", "zbv"):
        return None
    stand_in = SimpleNamespace(
        pp_group_size=num_ranks, _n_microbatches=num_micro, n_local_stages=2, _stages=[None, None],
        num_stages=2 * num_ranks, _num_stages=2 * num_ranks, number_of_rounds=num_rounds,
        microbatches_per_round=num_micro // num_rounds,
    )  # fmt: skip
    rows = []
    for rank in range(num_ranks):
        made = PUBLISHED[name]._calculate_single_rank_operations(stand_in, rank)
        parts = [part for action in made if action is not None for part in (action.sub_actions or (action,))]
        rows.append(tuple(Action(p.stage_index, COMPUTES[p.computation_type], p.microbatch_index) for p in parts))
    return PipelineSchedule(name, num_micro, tuple(rows), schedule_for(name, num_ranks, num_micro).placement)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_no_slower_and_no_fuller_than_the_published_order(name: str, num_ranks: int) -> None:
    compared = 0
    for num_micro in sorted(
        {1, 2, 3, num_ranks, num_ranks + 1, *(k * num_ranks for k in (2, 3, 4)), 2 * num_ranks + 1}
    ):
        theirs = published(name, num_ranks, num_micro)
        if theirs is not None:
            ours = schedule_for(name, num_ranks, num_micro)
            assert timeline(ours).makespan <= timeline(theirs).makespan
            assert max(peak_in_flight(ours)) <= max(peak_in_flight(theirs))
            compared += 1
    assert compared >= 3


@pytest.mark.parametrize(("name", "extra"), [("zbv", 0), ("dualpipev", 1), ("interleaved-zero-bubble", 0)])
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_zero_bubble_waits_for_the_first_micro_batch_alone(name: str, extra: int, num_ranks: int) -> None:
    """The last rank starts after P - 1 forwards: no schedule can take less time."""
    for num_micro in (2 * num_ranks, 3 * num_ranks, 6 * num_ranks):
        schedule = schedule_for(name, num_ranks, num_micro)
        assert timeline(schedule).makespan == 6 * num_micro + num_ranks - 1
        assert max(peak_in_flight(schedule)) == 2 * num_ranks + extra


def test_with_few_micro_batches_weights_still_fill_the_waits() -> None:
    ours, theirs = schedule_for("zbv", 8, 8), published("zbv", 8, 8)
    assert theirs is not None
    assert timeline(ours).makespan == 55 < timeline(theirs).makespan


@given(ranks, micros)
def test_dualpipev_is_zbv_where_there_is_no_middle(num_ranks: int, num_micro: int) -> None:
    same = schedule_for("dualpipev", num_ranks, num_micro).ranks == schedule_for("zbv", num_ranks, num_micro).ranks
    assert same == (num_micro < 2 * num_ranks)
