"""What a Llama saves for backward: the formula against what autograd really holds."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from closeranks.facts.memory.activations import (
    ActivationSettings,
    LlamaStage,
    Recompute,
    activation_bytes,
    block_saved_bytes,
    block_working_bytes,
    embedding_saved_bytes,
    head_saved_bytes,
    weight_cast_bytes,
)
from closeranks.facts.memory.state_bytes import Precision
from closeranks.facts.shapes.llama import LlamaShape, block_shapes
from closeranks.models.llama.spec import Llama

SHAPE = LlamaShape(dim=64, num_layers=3, num_heads=8, num_kv_heads=4, ffn_dim=160, vocab_size=96)
BATCH, LENGTH = 2, 40
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def held_by_autograd(shape: LlamaShape, precision: Precision) -> int:
    """Bytes of every storage that the forward of one micro-batch leaves for backward, weights and tables apart."""
    # The fused kernel, as on an accelerator: what `auto` takes for half precision on a CPU keeps all scores.
    module = Llama(shape, max_len=LENGTH, attention="flash")
    if precision == "float64":
        module.double()
    known = {tensor.untyped_storage().data_ptr() for tensor in (*module.parameters(), *module.buffers())}
    held: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in known:
            held[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    tokens = torch.randint(0, shape.vocab_size, (BATCH, LENGTH + 1))
    context = torch.autocast("cpu", HALF[precision]) if precision in HALF else nullcontext()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), context:
        module(tokens[:, :-1], tokens[:, 1:])
    return sum(tensor.untyped_storage().nbytes() for tensor in held.values())


def stage(shape: LlamaShape, *, in_flight: int = 1) -> LlamaStage:
    products = sum(rows * columns for rows, *rest in block_shapes(shape).values() for columns in rest)
    return LlamaStage(
        shape.num_layers, True, True, in_flight, shape.num_layers * products, shape.vocab_size * shape.dim
    )


@pytest.mark.parametrize("kv_heads", [8, 4])
@pytest.mark.parametrize("precision", ["float64", "float32", "bf16", "fp16"])
def test_the_formula_counts_what_autograd_holds(precision: Precision, kv_heads: int) -> None:
    shape = replace(SHAPE, num_kv_heads=kv_heads)
    passage = ActivationSettings(BATCH * LENGTH, precision)
    counted = (
        shape.num_layers * block_saved_bytes(shape, passage)
        + embedding_saved_bytes(passage)
        + head_saved_bytes(shape, passage)
    )
    counted += weight_cast_bytes(stage(shape), passage)
    assert counted == pytest.approx(held_by_autograd(shape, precision), rel=0.01)


@given(st.sampled_from(["float32", "bf16", "fp16"]), st.integers(1, 64))
def test_each_kind_of_recompute_keeps_less_and_works_more(precision: Precision, num_tokens: int) -> None:
    kinds: tuple[Recompute, ...] = ("none", "selective", "full")
    passages = [ActivationSettings(num_tokens, precision, recompute=recompute) for recompute in kinds]
    saved = [block_saved_bytes(SHAPE, passage) for passage in passages]
    working = [block_working_bytes(SHAPE, passage) for passage in passages]
    assert saved[0] > saved[1] > saved[2] > 0 == working[0]
    assert [kept + again for kept, again in zip(saved, working, strict=True)] == [saved[0]] * 3
    assert block_saved_bytes(SHAPE, replace(passages[1], keep=())) == saved[2]


def test_dropout_keeps_a_mask_of_bytes_for_each_of_its_two_places() -> None:
    plain = ActivationSettings(BATCH * LENGTH, "bf16")
    dropped = replace(plain, dropout=0.1)
    assert block_saved_bytes(SHAPE, dropped) - block_saved_bytes(SHAPE, plain) == 2 * BATCH * LENGTH * SHAPE.dim


def test_the_tensor_axis_splits_all_but_what_products_read() -> None:
    """Two gathered inputs of a block stay whole; everything else is halved."""
    alone, split = (block_saved_bytes(SHAPE, ActivationSettings(BATCH * LENGTH, "bf16", tensor)) for tensor in (1, 2))
    whole = 2 * BATCH * LENGTH * SHAPE.dim * 2
    assert split - whole == (alone - whole) // 2


def test_what_waits_in_a_pipeline_multiplies_and_what_one_backward_needs_does_not() -> None:
    passage = ActivationSettings(BATCH * LENGTH, "bf16", recompute="full")
    one, three = (
        asdict(activation_bytes(SHAPE, passage, [stage(SHAPE, in_flight=n)], is_pipeline=True)) for n in (1, 3)
    )
    for name in one:
        waits = name in ("blocks", "ends", "casts", "borders")
        assert three[name] == one[name] * (3 if waits else 1), name


def test_only_the_last_stage_has_logits() -> None:
    passage = ActivationSettings(BATCH * LENGTH)
    middle = LlamaStage(2, False, False, 1, 100, 0)
    found = asdict(activation_bytes(SHAPE, passage, [middle], is_pipeline=True))
    assert {name for name, size in found.items() if size} == {"blocks", "borders", "block_gradients"}
