"""How many bytes does a micro-batch keep for its backward, in a block, at the ends, and while one block is at work?

For a traced module, as tracing counted. For any transformer, by the counts of ``facts.memory.activations``, which
describe the Llama of this package tensor by tensor: another shape is counted as the Llama whose blocks are as wide.
Invariant: for a Llama trained by this package the bytes are exactly those counts.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from math import ceil
from typing import Literal

from closeranks.facts.memory.activations import (
    ActivationSettings,
    Keep,
    block_deferred_bytes,
    block_gradient_bytes,
    block_saved_bytes,
    block_working_bytes,
    embedding_saved_bytes,
    end_deferred_bytes,
    head_gradient_bytes,
    head_saved_bytes,
    head_working_bytes,
    late_freed_bytes,
)
from closeranks.facts.memory.state_bytes import Precision, element_bytes
from closeranks.facts.shapes.llama import LlamaShape
from closeranks.facts.shapes.module_trace import ModuleTrace
from closeranks.facts.shapes.transformer import TransformerShape
from closeranks.plan.memory.conventions import has_fused_kernels, has_fused_loss
from closeranks.plan.step_time.workload import PlanChoice, Workload

_COMPILED_SHARE = 0.75
"""Of what a traced block keeps when it is not compiled: compiled, norms and activations are computed again. (0.67 was
measured of a Llama.)"""
_ATTENTION: tuple[Keep, ...] = ("attention",)
_SCORE_BYTES = 5
"""Of each pair of query and key where attention is not fused: probabilities, their dropout mask and their product."""


@dataclass(frozen=True, slots=True)
class SavedActivations:
    """Bytes of one micro-batch on one rank."""

    block: float
    working: float
    """What the backward of one block needs on top, with recompute."""
    embedding: float
    head: float
    logits: float
    """What the backward of the loss needs on top."""
    hidden: float
    """One hidden state between two blocks."""
    logits_gradient: float = 0.0
    """What of ``logits`` the head's backward reads."""
    block_gradients: float = 0.0
    """Gradients of a block's activations while its backward runs."""
    deferred: float = 0.0
    """What a block keeps for weight gradients that come later."""
    deferred_end: float = 0.0
    """The same of the first stage, and of the head."""
    late_freed: float = 0.0
    """What each stage frees nevertheless."""


def saved_activations(workload: Workload, choice: PlanChoice) -> SavedActivations:
    if isinstance(workload.shape, ModuleTrace):
        return _of_trace(workload.shape, choice)
    shape = workload.transformer
    settings = _settings(workload, choice)
    share = shape.num_expert_layers / shape.num_layers
    dense = _block(shape, settings, workload, choice, is_expert=False)
    expert = _block(shape, settings, workload, choice, is_expert=True) if share else dense
    ends = _as_llama(shape, is_compiled=settings.is_compiled, is_expert=False)
    # Where blocks are compiled one by one, the loss is not; Megatron's converts the logits to float32 once, in place.
    at_end = replace(settings, is_compiled=settings.is_compiled and choice.software != "fsdp")
    copies = 1 if has_fused_loss(choice.software) or not has_fused_kernels(choice.software) else 3
    width = element_bytes(settings.precision).stream
    tokens = settings.tokens_per_rank if choice.sequence_parallel else settings.num_tokens
    return SavedActivations(
        block=(1 - share) * dense.saved + share * expert.saved,
        working=max(dense.working, expert.working),
        embedding=embedding_saved_bytes(settings),
        head=head_saved_bytes(ends, at_end),
        logits=copies * head_working_bytes(ends, at_end),
        hidden=tokens * shape.dim * width,
        logits_gradient=head_gradient_bytes(ends, at_end),
        block_gradients=block_gradient_bytes(ends, settings),
        deferred=block_deferred_bytes(ends, settings),
        deferred_end=end_deferred_bytes(ends, settings),
        late_freed=late_freed_bytes(ends, settings),
    )


@dataclass(frozen=True, slots=True)
class _BlockBytes:
    saved: float
    working: float


def _settings(workload: Workload, choice: PlanChoice) -> ActivationSettings:
    recompute: Literal["none", "selective", "full"] = choice.recompute
    if has_fused_kernels(choice.software) and recompute == "selective":
        recompute = "none"  # only the scores of attention are computed again
    return ActivationSettings(
        num_tokens=choice.micro_batch * ceil(workload.seq_len / choice.layout.context),
        precision=_activation_precision(choice),
        tensor=choice.layout.tensor,
        recompute=recompute,
        is_compiled=choice.compiled or has_fused_kernels(choice.software),
    )


def _activation_precision(choice: PlanChoice) -> Precision:
    if choice.precision == "fp32":
        return "float32"
    # Only this package keeps hidden states in float32 under fp16. What fp8 products read is kept in 16 bits.
    return "fp16" if choice.precision == "fp16" and choice.software == "closeranks" else "bf16"


def _block(
    shape: TransformerShape, settings: ActivationSettings, workload: Workload, choice: PlanChoice, *, is_expert: bool
) -> _BlockBytes:
    llama = _as_llama(shape, is_compiled=settings.is_compiled, is_expert=is_expert)
    saved, whole = float(block_saved_bytes(llama, settings)), 0.0
    if choice.software == "fsdp" and settings.recompute == "selective":
        # Every other product is computed again (torchtitan), where this package keeps them all.
        saved = (saved + block_saved_bytes(llama, replace(settings, keep=_ATTENTION))) / 2
    width = element_bytes(settings.precision)
    behind = (settings.num_tokens - settings.tokens_per_rank) * shape.dim
    if not choice.sequence_parallel:
        # The inputs of norms are then whole on every tensor rank; with full recompute only the block's input is kept.
        saved += behind * width.stream * (1 if choice.recompute == "full" else 2)
    elif choice.layout.tensor > 1 and has_fused_kernels(choice.software) and settings.recompute == "none":
        saved -= 2 * behind * width.compute  # the gathered inputs of products are gathered again in backward
    if not choice.fused_attention:
        keys = workload.seq_len
        whole = _SCORE_BYTES * shape.num_heads * settings.num_tokens * keys / settings.tensor
        saved += whole if choice.recompute == "none" else 0.0
    working = float(block_working_bytes(llama, settings)) + (whole if choice.recompute != "none" else 0.0)
    return _BlockBytes(saved, working)


def _as_llama(shape: TransformerShape, *, is_compiled: bool, is_expert: bool) -> LlamaShape:
    """The Llama whose blocks keep as many columns for a token as this shape's."""
    wide = (3 if is_compiled else 4) if shape.gated else 2
    inner = float(shape.ffn_dim)
    routed = 0.0
    if is_expert:
        active = shape.experts_per_token + shape.num_shared_experts
        inner = float(active * (shape.expert_ffn_dim or shape.ffn_dim))
        routed = 2.0 * shape.experts_per_token * shape.dim  # what is sent to the experts, and what comes back
    columns = 2 * (shape.attention_dim + shape.kv_dim) + wide * inner + routed
    kv_dim = shape.num_kv_heads * (shape.dim // shape.num_heads)
    ffn_dim = round((columns - 2 * shape.dim - 2 * kv_dim) / (3 if is_compiled else 4))
    return LlamaShape(
        shape.dim, shape.num_layers, shape.num_heads, shape.num_kv_heads, max(ffn_dim, 0), shape.vocab_size
    )


def _of_trace(trace: ModuleTrace, choice: PlanChoice) -> SavedActivations:
    """Ends and loss are counted with the first stage, as their weights are; copies of weights in half precision with
    the weights of blocks, and here for the rest."""
    blocks = list(trace.blocks) or list(trace.units)
    num_blocks = sum(1 for _ in trace.blocks) or 1
    rest = [unit for unit in trace.units if not unit.is_block] if any(trace.blocks) else []
    count, kept = choice.micro_batch, _COMPILED_SHARE if choice.compiled else 1.0
    whole = kept * sum(unit.saved_activation_bytes for unit in blocks) / num_blocks * count
    output = sum(unit.output_bytes for unit in blocks) / num_blocks * count
    # What selective recompute keeps is not known of a traced module: half of what it could drop.
    saved = {"none": whole, "selective": (whole + output) / 2, "full": min(output, whole)}[choice.recompute]
    ends = sum(unit.saved_activation_bytes * count + unit.fixed_saved_bytes for unit in rest)
    # Backward begins with the gradient of what the loss kept (logits), and of the output that it was computed from.
    logits = max((unit.saved_activation_bytes for unit in rest), default=0.0)
    logits += max((unit.output_bytes for unit in rest or blocks), default=0.0)
    # Gradients of what products return are not known either: as many bytes as a Llama's, half of what it saves.
    deferred = 0.5 * whole if choice.recompute == "none" and not choice.compiled else 0.0
    return SavedActivations(
        saved, whole - saved, ends, 0.0, logits * count, output, logits * count, deferred=deferred, deferred_end=output
    )


def activation_key(choice: PlanChoice) -> Hashable:
    """Equal for choices with the same activations."""
    return (
        choice.layout.tensor,
        choice.layout.context,
        choice.micro_batch,
        choice.recompute,
        choice.precision,
        choice.compiled,
        choice.fused_attention,
        choice.sequence_parallel,
        choice.software,
    )
