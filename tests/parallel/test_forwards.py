"""The order of forwards without backwards: complete, and safe where every message blocks both its ends."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from closeranks.facts.layout import SCHEDULES
from closeranks.facts.pipeline.programs import PipelineInstruction
from closeranks.facts.pipeline.stages import stage_placement
from closeranks.parallel.pipeline.executor import forward_only_program


def run_blocking(rows: tuple[tuple[PipelineInstruction, ...], ...]) -> tuple[set[tuple[int, int]], bool]:
    """Run as if a send and its receive had to meet; the forwards done, and whether all ranks came to their end."""
    at, done, moved = [0] * len(rows), set[tuple[int, int]](), True
    heads = lambda: [row[i] if i < len(row) else None for row, i in zip(rows, at, strict=True)]  # noqa: E731
    while moved:
        moved = False
        for rank, head in enumerate(heads()):
            if head is None:
                continue
            if head.kind == "F":
                assert head.stage == 0 or (head.stage - 1, head.micro) in done
                done.add((head.stage, head.micro))
                at[rank], moved = at[rank] + 1, True
            elif head.kind == "SEND_F" and head.peer is not None:
                other = heads()[head.peer]
                if other == PipelineInstruction("RECV_F", head.stage + 1, head.micro, rank):
                    at[rank], at[head.peer], moved = at[rank] + 1, at[head.peer] + 1, True
    return done, heads() == [None] * len(rows)


@given(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 6), st.integers(1, 9))
def test_every_micro_batch_passes_every_stage_and_nothing_locks_up(name: str, num_ranks: int, num_micro: int) -> None:
    places = stage_placement(name, num_ranks)
    done, ended = run_blocking(forward_only_program(places, num_micro))
    assert ended
    stages = [stage for own in places for stage in own]
    assert done == {(stage, micro) for stage in stages for micro in range(num_micro)}


@given(st.sampled_from(sorted(SCHEDULES)), st.integers(2, 6), st.integers(1, 9))
def test_what_is_received_is_read_before_the_next_but_one(name: str, num_ranks: int, num_micro: int) -> None:
    """A rank never piles up what it was sent: at most one hidden state a stage waits."""
    for row in forward_only_program(stage_placement(name, num_ranks), num_micro):
        waiting: dict[int, int] = {}
        for at in row:
            change = {"RECV_F": 1, "F": -1 if at.stage in waiting else 0}.get(at.kind, 0)
            waiting[at.stage] = waiting.get(at.stage, 0) + change
            assert waiting[at.stage] <= 1
