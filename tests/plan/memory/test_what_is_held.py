"""What ranks of the context axis divide, and what is never held at once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from closeranks.facts.cluster import parse_cluster
from closeranks.facts.layout import Layout
from closeranks.facts.shapes.llama import PRESETS
from closeranks.facts.shapes.transformer import from_llama
from closeranks.plan.memory.estimate import MemoryEstimate, memory_estimate
from closeranks.plan.step_time.workload import PlanChoice, Workload

SHAPE = from_llama(PRESETS["8b"])


def estimate(choice: PlanChoice, vocab_size: int = SHAPE.vocab_size) -> MemoryEstimate:
    work = Workload(replace(SHAPE, vocab_size=vocab_size), 4096, 64)
    return memory_estimate(work, choice, parse_cluster(f"{choice.layout.num_ranks}xh100"))


def test_ranks_of_the_context_axis_share_the_optimizer_as_data_ranks_do() -> None:
    alone = estimate(PlanChoice(Layout(8, zero=1))).part("optimizer")
    assert estimate(PlanChoice(Layout(4, zero=1, context=2))).part("optimizer") == alone
    assert estimate(PlanChoice(Layout(8, context=2))).part("optimizer") == pytest.approx(8 * alone, rel=1e-6)


def test_logits_and_a_block_computed_again_are_not_held_at_once() -> None:
    """Blocks are computed again after the logits are freed: the larger of the two counts."""
    choice = PlanChoice(Layout(8), recompute="full", software="megatron-core")
    held = [
        (found.part("logits and their gradient") > 0, found.part("one block computed again") > 0)
        for found in (estimate(choice, vocab_size) for vocab_size in (1_000, 1_000_000))
    ]
    assert held == [(False, True), (True, False)]
