"""Lowers a pipeline schedule to a program: the instructions of each rank, with sends and receives, free of deadlocks.

A program is a schedule with its messages written out. Invariant: there is one order of all instructions of all ranks in
which every send is next to its receive, so that a program completes even on a transport where both block.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import ClassVar, Literal

from closeranks.core.errors import UserError
from closeranks.facts.pipeline.actions import Action
from closeranks.facts.pipeline.schedules import PipelineSchedule, schedule_for
from closeranks.facts.pipeline.timeline import spans_by_end, timeline
from closeranks.facts.pipeline.validation import first_problem

InstructionKind = Literal["F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B"]

_DIRECTIONS = {"SEND_F": 1, "RECV_F": -1, "SEND_B": -1, "RECV_B": 1}
"""From the stage of a message to the stage at its other end."""


@dataclass(frozen=True, slots=True)
class PipelineInstruction:
    """One operation of a rank. ``1RECV_F0``: stage 1 receives the input of its forward of micro-batch 0."""

    kind: InstructionKind
    stage: int
    """The stage that runs it: SEND_F sends to the next stage, SEND_B to the previous one; RECV_F receives from the
    previous stage, RECV_B from the next one."""
    micro: int
    peer: int | None = None
    """For a send or a receive: the rank at the other end, on the pipeline axis."""

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro}"


@dataclass(frozen=True, slots=True)
class PipelineProgram:
    """What each rank computes, sends and receives, in order; as text the schedule's name, then a line per rank."""

    num_stages: int
    num_micro: int
    schedule: str
    ranks: tuple[tuple[PipelineInstruction, ...], ...]
    placement: tuple[tuple[int, ...], ...]
    """The stages of each rank."""

    is_lowered: ClassVar[bool] = True

    def __str__(self) -> str:
        return "\n".join([self.schedule, *(" ".join(map(str, row)) for row in self.ranks)])


@cache
def program_for(schedule: str, num_ranks: int, num_micro: int) -> PipelineProgram:
    """The validated program of a schedule by name."""
    program = lower(schedule_for(schedule, num_ranks, num_micro))
    validate(program)
    return program


def lower(schedule: PipelineSchedule) -> PipelineProgram:
    """Insert the messages into a schedule.

    Actions are simulated in time and emitted in the order in which they end; a message is emitted, at both its ends,
    right after the action whose result it carries. So a receive comes before the action that its rank is running at
    that moment, and an executor that posts receives without waiting overlaps the message with that action. Between two
    stages on one rank there is no message: the executor passes the tensor directly.
    """
    validate(schedule)
    rank_of = {stage: rank for rank, stages in enumerate(schedule.placement) for stage in stages}
    rows: list[list[PipelineInstruction]] = [[] for _ in schedule.ranks]
    for span in spans_by_end(timeline(schedule)):
        action, rank = span.action, rank_of[span.action.stage]
        rows[rank].append(PipelineInstruction(action.kind, action.stage, action.micro))
        target = {"F": action.stage + 1, "W": None}.get(action.kind, action.stage - 1)
        peer = None if target is None else rank_of.get(target)
        if target is not None and peer is not None and peer != rank:
            send, receive = _message(action, target, rank, peer)
            rows[rank].append(send)
            rows[peer].append(receive)
    ranks = tuple(map(tuple, rows))
    return PipelineProgram(len(rank_of), schedule.num_micro, schedule.name, ranks, schedule.placement)


def _message(action: Action, target: int, rank: int, peer: int) -> tuple[PipelineInstruction, PipelineInstruction]:
    micro = action.micro
    if action.kind == "F":
        return PipelineInstruction("SEND_F", action.stage, micro, peer), PipelineInstruction(
            "RECV_F", target, micro, rank
        )
    return PipelineInstruction("SEND_B", action.stage, micro, peer), PipelineInstruction("RECV_B", target, micro, rank)


def validate(plan: PipelineSchedule | PipelineProgram) -> None:
    """Check that a schedule or program, made here or by hand, does everything once and cannot deadlock; raises
    UserError with the first problem."""
    problem = first_problem(plan)
    if problem is None and isinstance(plan, PipelineProgram):
        problem = _wrong_peer(plan)
    if problem is not None:
        name = plan.schedule if isinstance(plan, PipelineProgram) else plan.name
        raise UserError(f"schedule {name} cannot run: {problem}", "Correct its order.")


def _wrong_peer(program: PipelineProgram) -> str | None:
    rank_of = {stage: rank for rank, stages in enumerate(program.placement) for stage in stages}
    for rank, row in enumerate(program.ranks):
        for instruction in row:
            direction = _DIRECTIONS.get(instruction.kind)
            peer = None if direction is None else rank_of[instruction.stage + direction]
            if instruction.peer != peer:
                return f"rank {rank} has {instruction} with rank {instruction.peer}, but its other end is rank {peer}"
    return None
