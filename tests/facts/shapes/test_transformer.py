"""Shapes of transformers: the same figures as for a Llama, and published sizes of others."""

from __future__ import annotations

import pytest

from closeranks.facts.shapes import llama
from closeranks.facts.shapes.transformer import (
    TransformerShape,
    flops_per_token,
    from_llama,
    num_params,
    shape_problems,
)

GPT3 = TransformerShape(96, 12_288, 96, 96, 128, 49_152, 51_200, gated=False, tied=True, learned_positions=2048)
MIXTRAL = TransformerShape(
    32, 4096, 32, 8, 128, 14_336, 32_000, num_experts=8, experts_per_token=2, expert_ffn_dim=14_336
)


@pytest.mark.parametrize("name", sorted(llama.PRESETS))
def test_a_llama_has_the_same_parameters_and_flops(name: str) -> None:
    shape = llama.PRESETS[name]
    assert num_params(from_llama(shape)) == llama.num_params(shape)
    assert flops_per_token(from_llama(shape), 4096) == llama.flops_per_token(shape, 4096)


def test_published_sizes() -> None:
    assert num_params(GPT3) == pytest.approx(174.6e9, rel=2e-3)
    assert num_params(MIXTRAL) == pytest.approx(46.7e9, rel=2e-3)


def test_only_active_experts_compute() -> None:
    dense = TransformerShape(32, 4096, 32, 8, 128, 2 * 14_336, 32_000)
    router = 6 * 32 * 4096 * 8
    assert flops_per_token(MIXTRAL, 2048) == flops_per_token(dense, 2048) + router


@pytest.mark.parametrize(
    ("shape", "sentence"),
    [
        (TransformerShape(0, 8, 1, 1, 8, 8, 8), "num_layers is 0"),
        (TransformerShape(1, 8, 3, 2, 8, 8, 8), "3 heads cannot share 2"),
        (TransformerShape(1, 8, 1, 1, 8, 8, 8, num_experts=4, experts_per_token=5), "cannot use 5 of 4 experts"),
    ],
)
def test_impossible_shapes(shape: TransformerShape, sentence: str) -> None:
    assert any(sentence in problem for problem in shape_problems(shape))
