from __future__ import annotations

import pytest
import torch
from breakdown import is_kernel, kind_of
from random_tokens import RandomTokens

from tests.benchmarks.scripts import run_script


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_7_64x128x64_1x1x1_kernel0_0", "attention"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<>", "attention"),
        ("nvjet_tst_192x208_64x4_2x1_v_bz_coopB_TNN", "matmul"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize2x1x1_execute", "matmul"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_256x128_32x3_nn_align8>", "matmul"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>", "optimizer and clip"),
        ("void at::native::multi_tensor_apply_kernel<LpNormFunctor<float, NormType::L2>>", "optimizer and clip"),
        ("triton_red_fused__log_softmax__to_copy_nll_loss_forward_0", "loss"),
        ("triton_poi_fused_mul_silu_1", "pointwise"),
        ("void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add<float>>", "pointwise"),
        ("void at::native::(anonymous namespace)::compute_grad_weight<float>(embedding_backward)", "embedding"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("something_new", "other"),
    ],
)
def test_kernels_are_sorted_by_what_they_do(kernel: str, kind: str) -> None:
    assert kind_of(kernel) == kind


@pytest.mark.parametrize(
    "name", ["Optimizer.step#AdamW.step", "Torch-Compiled Region: 0/0", "## Call CompiledFxGraph f3 ##", "step 12"]
)
def test_spans_over_kernels_are_not_kernels(name: str) -> None:
    assert not is_kernel(name)
    assert is_kernel("aten::mm")


def test_random_tokens_repeat_and_fill_the_vocabulary() -> None:
    first, second = (RandomTokens(seq_len=64, vocab_size=1000).read([3, 1])["tokens"] for _ in range(2))
    assert first.shape == (2, 65)
    assert torch.equal(first, second)
    everything = RandomTokens(seq_len=64, vocab_size=1000).read(range(256))["tokens"]
    assert everything.max() == 999


@pytest.mark.slow
def test_it_runs_without_a_gpu() -> None:
    sizes = ("--preset", "tiny", "--seq-len", "8", "--batch", "2", "--rounds", "2", "--steps", "2", "--warmup", "1")
    closing = run_script("gpu.py", *sizes, "--no-compile", "--profile")
    figures = closing["figures"]
    assert figures["losses_agree"]
    assert set(figures["profile_ms"]) == {"closeranks", "plain"}
    assert all(figures[name]["tokens_per_s"]["median"] > 0 for name in ("closeranks", "plain"))
    assert not closing["met"]


@pytest.mark.slow
def test_the_baseline_can_be_left_out() -> None:
    sizes = ("--preset", "tiny", "--seq-len", "8", "--batch", "1", "--rounds", "1", "--steps", "1", "--warmup", "1")
    figures = run_script("gpu.py", *sizes, "--no-compile", "--no-baseline", "--data", "text")["figures"]
    assert "plain" not in figures
    assert figures["closeranks"]["tokens_per_s"]["num"] == 1
