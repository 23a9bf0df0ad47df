"""The closed form of memory: equal to what layouts count weight by weight, and to peaks measured on a GPU."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from closeranks.facts.cluster import parse_cluster
from closeranks.facts.layout import Layout, LayoutConstraints
from closeranks.facts.memory.activations import ActivationSettings
from closeranks.facts.memory.memory_per_rank import CostSettings
from closeranks.facts.pipeline.occupancy import BackwardSplitting, pipeline_occupancy
from closeranks.facts.shapes.llama import PRESETS, llama_structure
from closeranks.facts.shapes.module_trace import ModuleTrace, Product, TracedUnit
from closeranks.facts.shapes.transformer import TransformerShape, from_llama, num_params
from closeranks.plan.layouts import LayoutCostModel, PlanningJob
from closeranks.plan.memory.conventions import CONVENTIONS, LEAN_12, MIXED_16, find_convention
from closeranks.plan.memory.estimate import MARGIN, MemoryEstimate, memory_estimate, side_by_side
from closeranks.plan.memory.in_flight import heads_held, stages_held
from closeranks.plan.step_time.workload import PlanChoice, Recompute, Workload
from closeranks.run.job.describe import ReducerBucketPlanner
from closeranks.sync.config import SyncConfig

GIB = 2**30
EXPERTS = TransformerShape(
    8, 1024, 16, 4, 64, 4096, 32_000, num_experts=16, experts_per_token=2, expert_ffn_dim=512, num_dense_layers=2
)


def estimate(preset: str, text: str, num_samples: int = 64, **choice: object) -> MemoryEstimate:
    layout = Layout.parse(text)
    workload = Workload(from_llama(PRESETS[preset]), 4096, num_samples)
    one = replace(PlanChoice(layout), **choice)  # type: ignore[arg-type]
    return memory_estimate(workload, one, parse_cluster(f"{layout.num_ranks}xh100"))


@pytest.mark.parametrize("num_samples", [64, 512])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(
    "text",
    [
        "data=64",
        "data=64 zero=1",
        "data=64 zero=2",
        "data=64 zero=3",
        "data=64 zero=3 shard=8",
        "data=8 tensor=8 zero=1",
        "data=4 tensor=4 pipeline=4",
        "data=4 tensor=4 pipeline=4 zero=1",
        "data=4 tensor=4 pipeline=4 zero=2",
        "data=4 tensor=4 pipeline=4 zero=3",
        "data=8 tensor=4 pipeline=2 zero=1 schedule=interleaved-1f1b",
        "data=8 tensor=2 pipeline=4 zero=1 schedule=gpipe",
        "data=8 tensor=2 pipeline=4 zero=1 schedule=zbv",
    ],
)
def test_it_is_what_layouts_count_weight_by_weight(text: str, recompute: Recompute, num_samples: int) -> None:
    shape, layout = PRESETS["8b"], Layout.parse(text)
    job = PlanningJob(
        llama_structure(shape, 4096),
        LayoutConstraints(num_samples, 1, shape.num_heads, shape.num_kv_heads, shape.num_layers, seq_len=4096),
        CostSettings(precision="bf16", buckets=ReducerBucketPlanner(SyncConfig())),
        shape,
        ActivationSettings(4096, "bf16", recompute=recompute, is_compiled=True),
    )
    counted = LayoutCostModel(job).cost(layout).fullest.total_bytes
    found = estimate("8b", text, num_samples, recompute=recompute)
    assert found.allocated_bytes == pytest.approx(counted, rel=0.04)


@pytest.mark.parametrize(
    ("preset", "batch", "recompute", "compiled", "peak_gib"),
    [
        ("1b", 8, "none", True, 69.15),
        ("1b", 8, "selective", True, 55.27),
        ("1b", 8, "full", True, 32.21),
        ("3b", 4, "none", True, 88.46),
        ("3b", 4, "selective", True, 70.95),
        ("3b", 4, "full", True, 49.74),
        ("1b_untied", 4, "none", True, 45.6),
        ("1b", 4, "none", False, 68.51),
        ("1b", 4, "selective", False, 51.63),
        ("1b", 4, "full", False, 39.10),
    ],
)
def test_peaks_measured_on_an_h200(preset: str, batch: int, recompute: str, compiled: bool, peak_gib: float) -> None:
    """The peaks of docs/layouts.md, and that of docs/benchmarks.md."""
    found = estimate(preset, "data=1", batch, micro_batch=batch, recompute=recompute, compiled=compiled)
    assert found.allocated_bytes / GIB == pytest.approx(peak_gib, rel=0.05)


@pytest.mark.parametrize(
    "schedule", ["1f1b", "gpipe", "interleaved-1f1b", "interleaved-zero-bubble", "zbv", "dualpipev"]
)
@pytest.mark.parametrize("num_micro", [4, 8, 32])
def test_micro_batches_in_flight_are_those_of_the_schedule(schedule: str, num_micro: int) -> None:
    layout = Layout(pipeline=4, schedule=schedule)
    per_rank = layout.num_stages // 4
    for rank, moment in enumerate(pipeline_occupancy(4, schedule, num_micro).fullest):
        stages = stages_held(layout, rank, num_micro, per_rank)
        assert [stage.held for stage in stages] == list(moment.held.values())
        assert [stage.deferred for stage in stages] == list(moment.deferred.values())


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved-1f1b", "zbv"])
def test_any_number_of_micro_batches_is_held_as_the_schedule_holds_it(schedule: str) -> None:
    """Fewer than ranks, too, and numbers that are no multiple of them."""
    for size, num_micro in product((2, 3, 4, 8), range(1, 26)):
        layout, occupancy = Layout(pipeline=size, schedule=schedule), pipeline_occupancy(size, schedule, num_micro)
        last, per_rank = layout.num_stages - 1, layout.num_stages // size
        for rank, moment in enumerate(occupancy.fullest):
            stages, held = stages_held(layout, rank, num_micro, per_rank), moment.held
            assert [stage.held for stage in stages] == list(held.values())
            if last in held:
                assert heads_held(layout, num_micro, stages[-1], "split") == held[last], (size, num_micro)


@pytest.mark.parametrize("splitting", ["split", "late", "whole"])
def test_more_ranks_hold_their_micro_batches_in_the_same_proportions(splitting: BackwardSplitting) -> None:
    """Of 16 ranks eight are simulated."""
    layout = Layout(pipeline=16, schedule="zbv")
    for num_micro in (4, 16, 24, 64):
        moments = pipeline_occupancy(16, "zbv", num_micro, splitting).fullest
        for rank in (0, 15):
            stages = stages_held(layout, rank, num_micro, 2, splitting)
            held, deferred = sum(moments[rank].held.values()), sum(moments[rank].deferred.values())
            assert sum(stage.held for stage in stages) == pytest.approx(held, abs=2)
            assert sum(stage.deferred for stage in stages) == pytest.approx(deferred, abs=2)


@pytest.mark.parametrize(
    ("text", "num_samples"),
    [
        ("data=8 pipeline=8 schedule=interleaved-1f1b", 64),
        ("data=8 pipeline=8 schedule=interleaved-1f1b", 96),
    ],
)
def test_stages_that_are_not_even_are_what_layouts_count(text: str, num_samples: int) -> None:
    """16 blocks on 16 stages, of which the last has only the head, and hardly more micro-batches than ranks."""
    shape, layout = PRESETS["1b"], Layout.parse(text)
    job = PlanningJob(
        llama_structure(shape, 4096),
        LayoutConstraints(num_samples, 1, shape.num_heads, shape.num_kv_heads, shape.num_layers, seq_len=4096),
        CostSettings(precision="bf16", buckets=ReducerBucketPlanner(SyncConfig())),
        shape,
        ActivationSettings(4096, "bf16", is_compiled=True),
    )
    counted = LayoutCostModel(job).cost(layout).fullest.total_bytes
    assert estimate("1b", text, num_samples).allocated_bytes == pytest.approx(counted, rel=0.06)


def test_conventions_keep_what_their_names_say() -> None:
    shape = from_llama(PRESETS["70b"])
    workload, choice = Workload(shape, 4096, 64), PlanChoice(Layout(), micro_batch=1, recompute="full")
    for convention, total in ((MIXED_16, 16), (LEAN_12, 12)):
        found = memory_estimate(workload, choice, parse_cluster("h100"), convention)
        state = sum(found.part(name) for name in ("weights", "gradients", "optimizer"))
        assert state == pytest.approx(total * num_params(shape), rel=1e-6)
    sixteen, twelve = side_by_side(workload, choice, parse_cluster("h100"))
    assert sixteen.total_bytes - twelve.total_bytes == pytest.approx(4 * num_params(shape), rel=1e-6)
    assert {find_convention(name).name for name in CONVENTIONS} == set(CONVENTIONS)


def test_the_verdict_leaves_its_margin() -> None:
    found = estimate("8b", "data=8 zero=3")
    for capacity, verdict in (
        (found.total_bytes * (1 + MARGIN) + 1, "fits"),
        (found.total_bytes * (1 + MARGIN / 2), "borderline"),
        (found.total_bytes * (1 - MARGIN / 2), "borderline"),
        (found.total_bytes * (1 - MARGIN) - 1, "does not fit"),
    ):
        one = replace(found, capacity_bytes=int(capacity))
        assert one.verdict == verdict
        assert one.missing_bytes == max(0, found.total_bytes - int(capacity))


def test_experts_context_and_offload_each_divide_what_they_should() -> None:
    workload, cluster = Workload(EXPERTS, 4096, 64), parse_cluster("8xh100")

    def found(choice: PlanChoice) -> MemoryEstimate:
        return memory_estimate(workload, choice, cluster, MIXED_16)

    plain = found(PlanChoice(Layout(8)))
    spread = found(PlanChoice(Layout(8, expert=8)))
    experts = EXPERTS.num_expert_layers * EXPERTS.num_experts * EXPERTS.expert_params
    assert plain.part("weights") - spread.part("weights") == pytest.approx(2 * experts * 7 / 8, rel=1e-6)
    sharded = found(PlanChoice(Layout(8, zero=1)))
    assert found(PlanChoice(Layout(8, zero=1, expert=8))).part("optimizer") == sharded.part("optimizer")
    assert found(PlanChoice(Layout(8), offload=True)).part("optimizer") == 0
    name = "activations of blocks"
    assert found(PlanChoice(Layout(2, context=4))).part(name) == pytest.approx(plain.part(name) / 4, rel=1e-6)
    assert found(PlanChoice(Layout(8), fused_attention=False)).part(name) > plain.part(name)


def test_a_traced_module_is_counted_unit_by_unit() -> None:
    block = TracedUnit(
        "block", 3_000_000, (Product(1, 1000, 2000),), saved_activation_bytes=5e6, fixed_saved_bytes=4e6,
        output_bytes=1e6, is_block=True,
    )  # fmt: skip
    ends = TracedUnit("ends", 500_000, saved_activation_bytes=8e6, fixed_saved_bytes=1e6, output_bytes=1e6)
    workload = Workload(ModuleTrace((block, block, block, block, ends), precision="bf16"), 1, 64)
    cluster = parse_cluster("8xh100")
    found = memory_estimate(workload, PlanChoice(Layout(8), 2, compiled=False), cluster)
    assert found.part("weights") == 4 * 12_500_000
    assert found.part("activations of blocks") == 4 * 2 * 5e6
    assert found.part("activations of embedding, head and loss") == 2 * 8e6 + 1e6
    assert found.part("logits and their gradient") == 2 * (8e6 + 1e6)
    assert found.part("weights cast for products") == 4 * 4e6
    small = replace(ends, saved_activation_bytes=2e6)
    workload = Workload(ModuleTrace((block, block, block, block, small), precision="bf16"), 1, 64)
    full = memory_estimate(workload, PlanChoice(Layout(8), 2, "full", compiled=False), cluster)
    assert full.part("activations of blocks") == 4 * 2 * 1e6
    assert full.part("one block computed again") == 2 * 4e6
    assert full.part("weights cast for products") == 0
    stage = memory_estimate(workload, PlanChoice(Layout(4, pipeline=2), 2), cluster)
    assert stage.part("weights") in (4 * 6_000_000, 4 * 6_500_000)
    flat = Workload(ModuleTrace((replace(block, is_block=False), ends)), 1, 64)
    assert memory_estimate(flat, PlanChoice(Layout(8)), cluster).part("weights") == 4 * 3_500_000


def test_a_transformers_llama_traced_on_fake_tensors_has_its_measured_peaks() -> None:
    """74.4 GiB as it is and 62.4 GiB compiled were measured on an H200, with 4 samples of 4096 positions."""
    mib = 2**20
    block = TracedUnit(
        "block", 60_821_504, saved_activation_bytes=560.5 * mib, fixed_saved_bytes=116 * mib, output_bytes=32 * mib,
        is_block=True,
    )  # fmt: skip
    ends = (
        TracedUnit("embedding", 262_668_288, output_bytes=32 * mib),
        TracedUnit("norm", 2048, saved_activation_bytes=64 * mib, output_bytes=32 * mib),
        TracedUnit("head", 262_668_288, (), (), 0.0, 0.0, 0.0, 0.0, 16 * mib, 501 * mib, 1002 * mib),
        TracedUnit("", 0, saved_activation_bytes=2004 * mib),
    )
    workload = Workload(ModuleTrace((*[block] * 16, *ends), precision="bf16"), 4096, 4)
    for compiled, peak_gib in ((False, 74.4), (True, 62.4)):
        found = memory_estimate(workload, PlanChoice(Layout(), 4, compiled=compiled), parse_cluster("h200"))
        assert found.allocated_bytes / GIB == pytest.approx(peak_gib, rel=0.05)
