"""The pipeline program of a forward pass without backward (evaluation).

Micro-batches move in waves: in wave w every stage s computes micro-batch w - s, then the messages are sent in the order
of their stages. Invariant: all ranks follow one order of messages, so that none can deadlock even where sends and
receives block.
"""

from __future__ import annotations

from functools import cache

from closeranks.facts.pipeline.programs import PipelineInstruction


@cache
def forward_only_program(
    placement: tuple[tuple[int, ...], ...], num_micro: int
) -> tuple[tuple[PipelineInstruction, ...], ...]:
    """The instructions of every rank; ``placement`` lists the stages of each."""
    home = {stage: rank for rank, stages in enumerate(placement) for stage in stages}
    rows: list[list[PipelineInstruction]] = [[] for _ in placement]
    for wave in range(len(home) + num_micro - 1):
        busy = [(stage, wave - stage) for stage in sorted(home) if 0 <= wave - stage < num_micro]
        for stage, micro in busy:
            rows[home[stage]].append(PipelineInstruction("F", stage, micro))
        for stage, micro in busy:
            sender, receiver = home[stage], home.get(stage + 1)
            if receiver is not None and receiver != sender:
                rows[sender].append(PipelineInstruction("SEND_F", stage, micro, receiver))
                rows[receiver].append(PipelineInstruction("RECV_F", stage + 1, micro, sender))
    return tuple(map(tuple, rows))
