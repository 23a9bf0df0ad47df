import pytest
from hypothesis import given
from hypothesis import strategies as st

from closeranks.core.errors import UserError
from closeranks.facts.layout import SCHEDULES
from closeranks.facts.pipeline.actions import completed_actions, dependencies
from closeranks.facts.pipeline.schedules import PipelineSchedule, schedule_for
from closeranks.facts.pipeline.timeline import ActionCosts, ideal_bubble, peak_in_flight, spans_by_end, timeline

names = st.sampled_from(sorted(SCHEDULES))
ranks = st.integers(1, 8)
micros = st.integers(1, 20)


@given(st.sampled_from(["gpipe", "1f1b"]), ranks, micros)
def test_gpipe_and_1f1b_wait_as_the_formula_says(name: str, num_ranks: int, num_micro: int) -> None:
    laid_out = timeline(schedule_for(name, num_ranks, num_micro))
    assert laid_out.makespan == 3 * (num_micro + num_ranks - 1)
    assert laid_out.bubble == pytest.approx(ideal_bubble(num_ranks, num_micro))
    assert laid_out.idle == (3 * (num_ranks - 1),) * num_ranks


@given(ranks, micros)
def test_what_gpipe_and_1f1b_hold(num_ranks: int, num_micro: int) -> None:
    assert peak_in_flight(schedule_for("gpipe", num_ranks, num_micro)) == (num_micro,) * num_ranks
    expected = tuple(min(num_micro, num_ranks - rank) for rank in range(num_ranks))
    assert peak_in_flight(schedule_for("1f1b", num_ranks, num_micro)) == expected


@given(st.integers(2, 8), st.integers(1, 20))
def test_two_stages_a_rank_halve_the_bubble(num_ranks: int, num_micro: int) -> None:
    """A round of micro-batches as long as the pipeline fills both stages without a gap: half of 3 (P - 1) is left."""
    for name in ("interleaved-1f1b", "looped-bfs"):
        laid_out = timeline(schedule_for(name, num_ranks, num_micro))
        assert laid_out.bubble <= ideal_bubble(num_ranks, num_micro) + 1e-9
        if num_micro >= num_ranks:
            assert laid_out.makespan == 6 * num_micro + 3 * (num_ranks - 1)


def test_zbv_hardly_waits() -> None:
    assert timeline(schedule_for("zbv", 8, 64)).bubble < 0.02 < ideal_bubble(8, 64) / 4


@given(names, ranks, micros, st.builds(ActionCosts, *[st.sampled_from([0.5, 1.0, 1.75, 3.0])] * 4))
def test_everything_starts_as_soon_as_it_can(name: str, num_ranks: int, num_micro: int, costs: ActionCosts) -> None:
    schedule = schedule_for(name, num_ranks, num_micro)
    laid_out = timeline(schedule, costs)
    ends = {done: span.end for spans in laid_out.ranks for span in spans for done in completed_actions(span.action)}
    for actions, spans in zip(schedule.ranks, laid_out.ranks, strict=True):
        assert tuple(span.action for span in spans) == actions
        free_at = 0.0
        for span in spans:
            assert span.start == max(
                [free_at, *(ends[need] for need in dependencies(span.action, schedule.num_stages))]
            )
            assert span.end - span.start == pytest.approx(costs.of(span.action.kind))
            free_at = span.end


def test_an_order_that_stops_is_refused() -> None:
    with pytest.raises(UserError, match="rank 0 waits forever for what 0B0 needs"):
        timeline(PipelineSchedule.parse("mine\n0B0 0F0"))


def test_what_ends_together_ends_along_the_way_of_the_messages() -> None:
    ended = [str(span.action) for span in spans_by_end(timeline(schedule_for("gpipe", 2, 2)))]
    assert ended == ["0F0", "0F1", "1F0", "1F1", "1B0", "1B1", "0B0", "0B1"]
