"""Arithmetic of the Llama family against published numbers."""

from __future__ import annotations

from dataclasses import replace
from math import pi, prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from closeranks.facts.shapes.llama import (
    PRESETS,
    LlamaShape,
    flops_per_token,
    num_matmul_params,
    num_params,
    num_params_per_block,
    parameter_shapes,
    rope_frequencies,
    shape_problems,
)

PUBLISHED = {
    "1b": 1_235_814_400,
    "3b": 3_212_749_824,
    "7b": 6_738_415_616,
    "8b": 8_030_261_248,
    "13b": 13_015_864_320,
    "70b": 70_553_706_496,
    "405b": 405_853_388_800,
}

shapes = st.builds(
    LlamaShape,
    dim=st.sampled_from([32, 64, 96]),
    num_layers=st.integers(1, 5),
    num_heads=st.sampled_from([4, 8]),
    num_kv_heads=st.sampled_from([1, 2, 4]),
    ffn_dim=st.integers(1, 300),
    vocab_size=st.integers(1, 1000),
    tied=st.booleans(),
)


@pytest.mark.parametrize(("preset", "count"), PUBLISHED.items())
def test_published_parameter_counts(preset: str, count: int) -> None:
    assert num_params(PRESETS[preset]) == count


def test_untied_adds_one_embedding() -> None:
    shape = PRESETS["1b_untied"]
    assert num_params(shape) - num_params(PRESETS["1b"]) == shape.vocab_size * shape.dim
    assert replace(shape, tied=True) == PRESETS["1b"]


def test_the_demo_model_stays_small() -> None:
    assert 1_000_000 <= num_params(PRESETS["small"]) <= 1_500_000
    assert PRESETS["small"].vocab_size == 256


@given(shapes)
def test_closed_form_equals_the_sum_over_names(shape: LlamaShape) -> None:
    sizes = {name: prod(dims) for name, dims in parameter_shapes(shape).items()}
    assert num_params(shape) == sum(sizes.values())
    first = sum(size for name, size in sizes.items() if name.startswith("model.layers.0."))
    assert num_params_per_block(shape) == first


@given(shapes, st.integers(1, 4096))
def test_flops_conventions(shape: LlamaShape, seq_len: int) -> None:
    full = flops_per_token(shape, seq_len)
    assert full == 6 * num_matmul_params(shape) + 12 * shape.num_layers * shape.dim * seq_len
    assert flops_per_token(replace(shape, tied=not shape.tied), seq_len) == full


def test_flops_of_8b_are_those_torchtitan_reports() -> None:
    """338.65 TFLOP/s at 5,847 tokens/s and a sequence of 8192: 57.9 GFLOP a token."""
    assert flops_per_token(PRESETS["8b"], 8192) == pytest.approx(338.65e12 / 5847, rel=1e-3)


def test_plain_rotary_frequencies_fall_geometrically() -> None:
    shape = PRESETS["small"]
    found = rope_frequencies(shape)
    assert len(found) == shape.head_dim // 2
    assert found[0] == 1.0
    for pair, frequency in enumerate(found):
        assert frequency == pytest.approx(1 / shape.rope_theta ** (2 * pair / shape.head_dim), rel=1e-14)


@pytest.mark.parametrize("preset", ["1b", "8b"])
def test_stretched_rotary_frequencies_keep_the_fast_and_slow_the_slow(preset: str) -> None:
    shape = PRESETS[preset]
    plain = rope_frequencies(replace(shape, rope_factor=1.0))
    blended = 0
    for before, after in zip(plain, rope_frequencies(shape), strict=True):
        wavelength = 2 * pi / before
        if wavelength < 8192 / 4:
            assert after == before
        elif wavelength > 8192:
            assert after == before / shape.rope_factor
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            assert after == pytest.approx((1 - smooth) * before / shape.rope_factor + smooth * before, rel=1e-14)
            blended += 1
    assert blended > 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_heads": 3}, "dim 128 does not split into 3 heads"),
        ({"num_heads": 128, "num_kv_heads": 8}, "odd"),
        ({"num_kv_heads": 5}, "16 heads cannot share 5 key-value heads evenly; num_kv_heads = 1 would do"),
        ({"rope_factor": 8.0, "rope_low_freq_factor": 4.0}, "rope_low_freq_factor"),
    ],
)
def test_impossible_shapes_say_why(change: dict[str, float], words: str) -> None:
    assert words in " ".join(shape_problems(replace(PRESETS["tiny"], **change)))


def test_presets_are_possible() -> None:
    assert [problem for shape in PRESETS.values() for problem in shape_problems(shape)] == []
