"""Rows of published runs as plans: what is read from the row, what is assumed, and what is refused with its reason."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from closeranks.facts.shapes.transformer import num_params
from closeranks.plan.validation.run_plan import RunPlan, plan_of, plan_runs
from closeranks.plan.validation.run_table import PublishedRun, load_runs

TABLE = Path(__file__).parents[3] / "benchmarks" / "plan_runs.csv"
LLAMA = PublishedRun(
    "some/where:table", "H100-80GB-SXM", 64, 2, model="Llama-2-70B", precision="bf16", recompute="full",
    params_b=68.98, layers=80, hidden=8192, heads=64, kv_heads=8, ffn_hidden=28672, vocab=32000, seq_len=4096,
    gpus_per_node=8, tp=8, pp=4, dp=2, micro_batch=1, global_batch=128, step_time_s=40.0,
)  # fmt: skip


def plan(**values: object) -> RunPlan:
    found = plan_of(replace(LLAMA, **values))  # type: ignore[arg-type]
    assert isinstance(found, RunPlan), found
    return found


def test_a_row_becomes_workload_choice_and_cluster() -> None:
    found = plan(interleave_v=5, note="8x200Gb HDR IB/node")
    shape = found.workload.shape
    assert (shape.gated, shape.tied, shape.head_dim) == (True, False, 128)
    assert num_params(shape) / 1e9 == pytest.approx(68.98, rel=1e-3)
    assert str(found.choice.layout) == "data=2 zero=1 tensor=8 pipeline=4"
    assert (found.choice.stages_per_rank, found.choice.recompute, found.kind) == (5, "full", "dense 16-bit")
    assert found.cluster.num_hosts == 8
    assert found.cluster.inter_host is not None
    assert found.cluster.inter_host.bytes_per_s == 25e9


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"layers": None}, "number of layers is not published"),
        ({"micro_batch": None}, "micro_batch is not published"),
        ({"global_batch": None, "tokens_per_s_per_gpu": 3.0}, "global_batch is not published"),
        ({"step_time_s": None}, "neither a step time nor a throughput"),
        ({"gpu": "TPUv5"}, "the table of devices has no 'TPUv5'"),
        ({"model": "Mixtral-8x7B"}, "its experts are not described"),
        ({"ep": 8}, "its experts are not described"),
        ({"ep": 3, "note": "MoE E=8 top2", "params_b": None}, "its expert ranks do not divide"),
        ({"params_b": 7.0}, "do not add up to the published number of parameters"),
        ({"tp": 5}, "its axes do not divide its GPUs"),
        ({"dp": 3}, "its axes do not multiply to its GPUs"),
        ({"zero_stage": 7}, "there is no such ZeRO stage"),
        ({"interleave_v": 40}, "80 layers do not fill 160 stages"),
        ({"global_batch": 1}, "cannot share"),
        ({"micro_batch": 256}, "the micro-batch is larger than the global batch"),
        ({"kv_heads": 7}, "cannot share 7 key-value heads"),
        ({"tp": None, "pp": None, "dp": None}, "its layout is not published"),
    ],
)
def test_a_row_that_cannot_be_planned_says_why(values: dict[str, object], reason: str) -> None:
    found = plan_of(replace(LLAMA, **values))  # type: ignore[arg-type]
    assert isinstance(found, str)
    assert reason in found


def test_what_a_row_does_not_state_follows_from_its_hardware_and_remarks() -> None:
    assert plan(recompute="", gpu="B200-SXM").choice.recompute == "none"
    assert plan(recompute="", micro_batch=32).choice.recompute == "full"
    old = plan(gpu="A100-80GB-SXM", precision="fp16")
    assert (old.choice.fused_attention, old.choice.sequence_parallel, old.choice.layout.zero) == (False, False, 0)
    assert plan(gpu="A100-80GB-SXM", precision="fp16", note="FlashAttention").choice.fused_attention
    assert plan(precision="", note="precision not stated (FP8 recipe)").kind == "dense fp8"
    assert plan(tp=1, pp=1, dp=64, note="FSDP full shard").choice.software == "fsdp"
    experts = plan(
        model="Qwen3-30B-A3B", note="MoE E=128 top8 shared=0, ffn_hidden is per expert", params_b=30.5, layers=48,
        hidden=2048, heads=32, kv_heads=4, ffn_hidden=768, vocab=151936, tp=1, pp=1, dp=64, ep=8, seq_len=4096,
    )  # fmt: skip
    assert (experts.kind, experts.workload.shape.head_dim, experts.choice.layout.expert) == ("experts", 128, 8)


def test_most_rows_of_our_table_are_planned_and_every_other_has_a_reason() -> None:
    table = load_runs(TABLE)
    plans, unusable = plan_runs(table.runs)
    assert len(plans) + len(unusable) == len(table.runs)
    assert len(plans) >= 365
    assert all(one.reason for one in unusable)
    dense = [one for one in plans if not one.workload.shape.num_experts and one.run.params_b]
    for one in dense:
        assert num_params(one.workload.shape) / 1e9 == pytest.approx(one.run.params_b, rel=0.05), one.run.model
