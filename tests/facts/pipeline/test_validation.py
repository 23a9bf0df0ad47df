"""The proof itself is checked against another one: the same rules as a graph, sorted by the standard library."""

from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from closeranks.facts.layout import SCHEDULES
from closeranks.facts.pipeline.actions import ActionText
from closeranks.facts.pipeline.programs import PipelineInstruction, PipelineProgram, program_for
from closeranks.facts.pipeline.schedules import PipelineSchedule, schedule_for
from closeranks.facts.pipeline.validation import first_problem

names = st.sampled_from(sorted(SCHEDULES))
ranks = st.integers(1, 8)
micros = st.integers(1, 20)


@given(names, ranks, micros)
def test_every_schedule_and_its_program_pass(name: str, num_ranks: int, num_micro: int) -> None:
    assert first_problem(schedule_for(name, num_ranks, num_micro)) is None
    assert first_problem(program_for(name, num_ranks, num_micro)) is None


def rewritten(program: PipelineProgram, rank: int, row: list[PipelineInstruction]) -> PipelineProgram:
    return replace(program, ranks=(*program.ranks[:rank], tuple(row), *program.ranks[rank + 1 :]))


def can_be_sorted(program: PipelineProgram) -> bool:
    """Whether some order of everything keeps every rank's own order and every need, sends being one with receives."""
    home = {stage: rank for rank, stages in enumerate(program.placement) for stage in stages}

    def node(stage: int, kind: str, micro: int) -> tuple[str, int, int]:
        """A message is named after its sender at both its ends; a backward in two parts is known by the first."""
        if kind.startswith("RECV"):
            return "SEND" + kind[4:], stage + (-1 if kind == "RECV_F" else 1), micro
        return {"I": "B"}.get(kind, kind), stage, micro

    graph: TopologicalSorter[tuple[str, int, int]] = TopologicalSorter()
    for rank, row in enumerate(program.ranks):
        nodes = [node(i.stage, i.kind, i.micro) for i in row]
        for before, after in pairwise(nodes):
            graph.add(after, before)
        for i, after in zip(row, nodes, strict=True):
            if i.kind in ("B", "I", "SEND_F"):
                graph.add(after, ("F", i.stage, i.micro))
            if i.kind in ("W", "SEND_B"):
                graph.add(after, ("B", i.stage, i.micro))
            other = {"F": i.stage - 1, "B": i.stage + 1, "I": i.stage + 1}.get(i.kind)
            if other in home:
                kind = "F" if i.kind == "F" else "B"
                graph.add(after, (kind if home[other] == rank else f"SEND_{kind}", other, i.micro))
    try:
        graph.prepare()
    except CycleError:
        return False
    return True


@given(names, st.integers(1, 4), st.integers(1, 6), st.data())
def test_two_swapped_instructions_pass_exactly_if_an_order_is_left(
    name: str, num_ranks: int, num_micro: int, data: st.DataObject
) -> None:
    program = program_for(name, num_ranks, num_micro)
    rank = data.draw(st.integers(0, num_ranks - 1))
    row = list(program.ranks[rank])
    first, second = (data.draw(st.integers(0, len(row) - 1)) for _ in range(2))
    row[first], row[second] = row[second], row[first]
    swapped = rewritten(program, rank, row)
    assert (first_problem(swapped) is None) == can_be_sorted(swapped)


@given(names, st.integers(1, 4), st.integers(1, 6), st.data())
def test_a_dropped_instruction_is_missed(name: str, num_ranks: int, num_micro: int, data: st.DataObject) -> None:
    program = program_for(name, num_ranks, num_micro)
    rank = data.draw(st.integers(0, num_ranks - 1))
    row = list(program.ranks[rank])
    del row[data.draw(st.integers(0, len(row) - 1))]
    assert first_problem(rewritten(program, rank, row)) is not None


@given(names, st.integers(1, 4), st.integers(1, 6), st.data())
def test_a_repeated_instruction_is_seen(name: str, num_ranks: int, num_micro: int, data: st.DataObject) -> None:
    program = program_for(name, num_ranks, num_micro)
    rank = data.draw(st.integers(0, num_ranks - 1))
    row = list(program.ranks[rank])
    row.insert(data.draw(st.integers(0, len(row))), data.draw(st.sampled_from(row)))
    assert "2 times" in (first_problem(rewritten(program, rank, row)) or "")


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (["0F0 0B0", "1F0 1B0"], None),
        (["0F0 0I0 0W0", "1F0 1B0"], None),
        (["0F0 0B0", "1B0 1F0"], "rank 1 has 1B0 before 1F0, which it needs"),
        (["0F0 0W0 0I0", "1F0 1B0"], "rank 0 has 0W0 before 0I0, which it needs"),
        (["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"], "ranks wait for each other: rank 0 is at 0B0 and needs 1I0, "
         "rank 1 is at 1F1 and needs 0F1"),
        (["0F0 0B0", "1F0"], "rank 1 lacks 1B0"),
        (["0F0 0I0", "1F0 1B0"], "rank 0 lacks 0W0"),
        (["0F0 0B0 0W0", "1F0 1B0"], "rank 0 has 0W0, but 0B0 is the whole backward already"),
        (["0F0 0B0", "1F0 1B0 1F1 1B1"], "rank 0 lacks 0F1"),
        (["0F0 0B0 0B0", "1F0 1B0"], "rank 0 has 0B0 2 times"),
        (["0F0 0B0", "2F0 2B0"], "stage 1 is on no rank, not on exactly one"),
        (["0F0 0B0 1F0", "1F0 1B0"], "stage 1 is on the ranks [0, 1], not on exactly one"),
        (["", ""], "stage 0 is on no rank, not on exactly one"),
    ],
)  # fmt: skip
def test_the_first_thing_wrong_with_a_schedule_by_hand(rows: list[str], said: str | None) -> None:
    assert first_problem(PipelineSchedule.parse("\n".join(["mine", *rows]))) == said


def test_a_stage_or_micro_batch_that_is_not_there() -> None:
    def told(row: str) -> str | None:
        return first_problem(PipelineSchedule("mine", 1, (PipelineSchedule.parse(f"mine\n{row}").ranks[0],), ((0,),)))

    assert told("0F0 0B0 1F0") == "rank 0 has 1F0, but stage 1 is on rank none"
    assert told("0F0 0B0 0F1") == "rank 0 has 0F1, but there are only 1 micro-batches"


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (["0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"], None),
        (["0F0 0SEND_F0 0B0 0RECV_B0", "1RECV_F0 1F0 1B0 1SEND_B0"], "rank 0 has 0B0 before 0RECV_B0, which it needs"),
        (["0SEND_F0 0F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"], "rank 0 has 0SEND_F0 before 0F0, which it needs"),
        (["0F0 0SEND_F0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"], "rank 0 lacks 0RECV_B0"),
        (["0F0 0SEND_B0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"],
         "rank 0 has 0SEND_B0, but there is nothing to send"),
        # Each sends before it receives: it runs where a send returns at once, and locks up where it waits.
        (["0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
          "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1"],
         "ranks wait for each other: rank 0 is at 0SEND_F1 and needs 1RECV_F1, "
         "rank 1 is at 1SEND_B0 and needs 0RECV_B0"),
    ],
)  # fmt: skip
def test_the_first_thing_wrong_with_a_program_by_hand(rows: list[str], said: str | None) -> None:
    words = [[ActionText.parse(word) for word in row.split()] for row in rows]
    ranks = tuple(tuple(PipelineInstruction(kind, stage, micro) for stage, kind, micro in row) for row in words)  # type: ignore[arg-type]
    num_micro = 1 + max(word.micro for row in words for word in row)
    assert first_problem(PipelineProgram(2, num_micro, "mine", ranks, ((0,), (1,)))) == said
