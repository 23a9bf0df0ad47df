import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from closeranks.core.errors import UserError
from closeranks.facts.layout import SCHEDULES
from closeranks.facts.pipeline.actions import ACTION_KINDS
from closeranks.facts.pipeline.programs import PipelineInstruction, lower, program_for, validate
from closeranks.facts.pipeline.schedules import PipelineSchedule, schedule_for

names = st.sampled_from(sorted(SCHEDULES))
ranks = st.integers(1, 8)
micros = st.integers(1, 20)


def test_a_program_word_for_word() -> None:
    """A receive stands before what its rank does while the message is made, where it can be posted ahead."""
    assert str(program_for("1f1b", 2, 3)).splitlines() == [
        "1f1b",
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0F2 0SEND_F2 0RECV_B1 0B1 0RECV_B2 0B2",
        "1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1RECV_F2 1B1 1SEND_B1 1F2 1B2 1SEND_B2",
    ]


@given(names, ranks, micros)
def test_a_program_computes_its_schedule(name: str, num_ranks: int, num_micro: int) -> None:
    program, schedule = program_for(name, num_ranks, num_micro), schedule_for(name, num_ranks, num_micro)
    computed = [[str(i) for i in row if i.kind in ACTION_KINDS] for row in program.ranks]
    assert computed == [[str(action) for action in row] for row in schedule.ranks]
    assert (program.num_micro, program.schedule, program.placement) == (num_micro, name, schedule.placement)
    assert program.num_stages == num_ranks * SCHEDULES[name]


@given(names, ranks, micros)
def test_messages_between_two_ranks_are_received_in_the_order_they_are_sent(
    name: str, num_ranks: int, num_micro: int
) -> None:
    """Transports that match by order alone need no more than this."""
    program = program_for(name, num_ranks, num_micro)
    for rank, row in enumerate(program.ranks):
        for peer, other in enumerate(program.ranks):
            sent = [(i.kind[5:], i.micro) for i in row if i.kind.startswith("SEND") and i.peer == peer]
            received = [(i.kind[5:], i.micro) for i in other if i.kind.startswith("RECV") and i.peer == rank]
            assert sent == received


@given(st.integers(2, 8), micros)
def test_receives_are_posted_ahead_of_what_a_rank_does_meanwhile(num_ranks: int, num_micro: int) -> None:
    program = program_for("gpipe", num_ranks, num_micro)
    for rank, row in enumerate(program.ranks):
        words = [str(i) for i in row]
        for micro in range(1, num_micro):
            if rank > 0:
                assert words.index(f"{rank}RECV_F{micro}") < words.index(f"{rank}F{micro - 1}")
            if rank < num_ranks - 1:
                assert words.index(f"{rank}RECV_B{micro}") < words.index(f"{rank}B{micro - 1}")


@pytest.mark.parametrize("name", ["zbv", "dualpipev"])
def test_the_bottom_of_a_v_hands_over_on_its_own_rank(name: str) -> None:
    program = program_for(name, 3, 6)
    assert program.placement == ((0, 5), (1, 4), (2, 3))
    crossing = {(i.kind, i.stage) for i in program.ranks[2] if i.peer is not None}
    assert crossing == {("RECV_F", 2), ("SEND_B", 2), ("SEND_F", 3), ("RECV_B", 3)}


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_one_rank_sends_nothing(name: str) -> None:
    (row,) = program_for(name, 1, 5).ranks
    assert {i.kind for i in row} <= {"F", "B", "I", "W"}


def test_peers_are_ranks_along_the_pipeline() -> None:
    program = program_for("interleaved-1f1b", 2, 2)
    assert PipelineInstruction("SEND_F", 1, 0, peer=0) in program.ranks[1]
    assert PipelineInstruction("RECV_F", 2, 0, peer=1) in program.ranks[0]


def test_a_schedule_by_hand_is_lowered_once_it_is_valid() -> None:
    mine = PipelineSchedule.parse("mine\n0F0 0B0\n1F0 1I0 1W0")
    assert str(lower(mine)).splitlines()[1:] == ["0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1I0 1SEND_B0 1W0"]
    with pytest.raises(UserError, match="schedule mine cannot run: rank 1 lacks 1W0"):
        lower(PipelineSchedule.parse("mine\n0F0 0B0\n1F0 1I0"))


def test_a_message_to_the_wrong_rank_is_refused() -> None:
    program = program_for("1f1b", 3, 1)
    first = tuple(replace(i, peer=2) if i.kind == "SEND_F" else i for i in program.ranks[0])
    with pytest.raises(UserError, match="rank 0 has 0SEND_F0 with rank 2, but its other end is rank 1"):
        validate(replace(program, ranks=(first, *program.ranks[1:])))


def test_a_program_is_made_once() -> None:
    assert program_for("zbv", 4, 8) is program_for("zbv", 4, 8)


def test_neither_torch_nor_numpy_is_imported() -> None:
    program = (
        "import sys\n"
        "from closeranks.facts.pipeline import programs, stages\n"
        "programs.program_for('zbv', 2, 4)\n"
        "print(sorted({'torch', 'numpy'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
