"""Whatever is asked: an estimate has finite parts that are not negative, or the choice is refused with its reasons."""

from __future__ import annotations

from dataclasses import replace
from math import isfinite

import pytest
from hypothesis import given
from hypothesis import strategies as st

from closeranks.core.errors import ConfigError
from closeranks.facts.cluster import parse_cluster
from closeranks.facts.layout import SCHEDULES, Layout
from closeranks.facts.shapes.transformer import TransformerShape
from closeranks.plan.step_time.constants import frozen_constants
from closeranks.plan.step_time.estimate import estimate_step
from closeranks.plan.step_time.workload import PlanChoice, Workload, choice_problems

powers = st.sampled_from([1, 2, 3, 4, 8, 16])
shapes = st.builds(
    TransformerShape,
    num_layers=st.integers(1, 100),
    dim=st.sampled_from([1, 100, 1024, 12_288]),
    num_heads=st.sampled_from([8, 96]),
    num_kv_heads=st.sampled_from([1, 8]),
    head_dim=st.sampled_from([1, 64, 108, 128]),
    ffn_dim=st.integers(1, 50_000),
    vocab_size=st.integers(1, 300_000),
    gated=st.booleans(),
    tied=st.booleans(),
)
layouts = st.builds(
    Layout,
    data=powers,
    zero=st.integers(0, 3),
    tensor=powers,
    pipeline=powers,
    context=st.sampled_from([1, 2]),
    schedule=st.sampled_from(sorted(SCHEDULES)),
)
choices = st.builds(
    PlanChoice,
    layout=layouts,
    micro_batch=st.integers(1, 64),
    recompute=st.sampled_from(["none", "selective", "full"]),
    precision=st.sampled_from(["fp32", "bf16", "fp16", "fp8"]),
    compiled=st.booleans(),
    fused_attention=st.booleans(),
    sequence_parallel=st.booleans(),
    overlap=st.booleans(),
    offload=st.booleans(),
    software=st.sampled_from(sorted(frozen_constants().software)),
)


@given(shapes, choices, st.sampled_from([1, 128, 2048, 131_072]), st.sampled_from(["h100", "v100", "gb200", "cpu"]))
def test_an_estimate_or_a_reason(shape: TransformerShape, choice: PlanChoice, seq_len: int, device: str) -> None:
    cluster = replace(parse_cluster(device), num_devices=choice.layout.num_ranks, devices_per_host=1)
    work = Workload(shape, seq_len, 256)
    if choice_problems(work, choice, cluster.num_devices):
        with pytest.raises(ConfigError):
            estimate_step(work, choice, cluster)
        return
    estimate = estimate_step(work, choice, cluster)
    assert estimate.seconds > 0
    assert all(isfinite(part.seconds) and part.seconds >= 0 for part in estimate.parts)
    assert 0 < estimate.mfu <= estimate.hfu
    if device != "cpu":
        assert estimate.hfu < 1
