"""Parts of a step that a model's shape decides: the loss over a vocabulary, the optimizer, and work of one GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from closeranks.facts.cluster import parse_cluster
from closeranks.facts.layout import Layout
from closeranks.facts.shapes.llama import PRESETS
from closeranks.facts.shapes.transformer import from_llama, num_params
from closeranks.plan.step_time.constants import frozen_constants
from closeranks.plan.step_time.estimate import StepEstimate, estimate_step
from closeranks.plan.step_time.workload import PlanChoice, Workload

SHAPE = from_llama(PRESETS["8b"])
HOST = parse_cluster("8xh100")


def step(choice: PlanChoice, vocab_size: int = SHAPE.vocab_size) -> StepEstimate:
    return estimate_step(Workload(replace(SHAPE, vocab_size=vocab_size), 4096, 64), choice, HOST)


def test_the_loss_grows_with_the_vocabulary() -> None:
    """Eight times the vocabulary: eight times the bytes of the logits, and more products of the head."""
    plain = PlanChoice(Layout(8))
    small, large = step(plain, 32_768), step(plain, 8 * 32_768)
    assert large.part("loss") == pytest.approx(8 * small.part("loss"))
    assert large.part("compute: products") > 1.1 * small.part("compute: products")
    split = step(PlanChoice(Layout(1, tensor=8)))  # eight times as many micro-batches, an eighth of the logits of each
    assert split.part("loss") == pytest.approx(step(plain).part("loss"))
    assert step(replace(plain, compiled=False)).part("loss") > 2 * step(plain).part("loss")


def test_the_optimizer_moves_34_bytes_for_each_parameter_of_a_shard() -> None:
    reached = frozen_constants().memory.reachable * HOST.device.memory_bytes_per_s
    whole = step(PlanChoice(Layout(8))).part("optimizer")
    assert whole == pytest.approx(34 * num_params(SHAPE) / reached, rel=1e-3)
    for zero in (1, 2, 3):
        assert step(PlanChoice(Layout(8, zero=zero))).part("optimizer") == pytest.approx(whole / 8)
    assert step(PlanChoice(Layout(8), optimizer="sgd")).part("optimizer") == pytest.approx(whole * 20 / 34)


def test_only_the_rank_with_the_head_computes_the_loss() -> None:
    """Of 8B in four stages the last, with nearly a whole block less, is not the fullest."""
    assert step(PlanChoice(Layout(2, pipeline=4))).part("loss") == 0
    assert step(PlanChoice(Layout(2, pipeline=4)), 16 * SHAPE.vocab_size).part("loss") > 0


def test_fp8_is_for_blocks_and_not_for_the_head() -> None:
    """So a larger vocabulary costs the same products in both."""
    more = [
        step(choice, 8 * SHAPE.vocab_size).part("compute: products") - step(choice).part("compute: products")
        for choice in (PlanChoice(Layout(8)), PlanChoice(Layout(8), precision="fp8"))
    ]
    assert more[0] == pytest.approx(more[1])
    plain, fast = (step(PlanChoice(Layout(8), precision=one)) for one in ("bf16", "fp8"))  # type: ignore[arg-type]
    assert fast.part("compute: products") < 0.75 * plain.part("compute: products")


def test_offload_moves_eight_bytes_for_each_parameter_and_hides_none() -> None:
    found = step(PlanChoice(Layout(8, zero=1), offload=True)).part("optimizer")
    assert found == pytest.approx(8 * num_params(SHAPE) / 8 / 20e9, rel=1e-3)


def test_the_smaller_parts_of_one_h200_step() -> None:
    """1.5B Llama, bf16, compiled, 4 x 4,096 tokens: pointwise 19.3 ms, loss 5.6, and 16.3 for optimizer and clipping,
    of which the passes that clipping adds are not modelled."""
    work = Workload(from_llama(PRESETS["1b_untied"]), 4096, 4)
    found = estimate_step(work, PlanChoice(Layout(), micro_batch=4), parse_cluster("h200"))
    assert found.part("compute: memory-bound") == pytest.approx(0.0193, rel=0.15)
    assert found.part("loss") == pytest.approx(0.0056, rel=0.15)
    assert found.part("optimizer") == pytest.approx(0.0163, rel=0.25)
