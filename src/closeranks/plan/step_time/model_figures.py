"""What does the time of a step need to know of a model, whether its shape is known or it was traced?

Invariant: parameters and FLOPs of the parts add up to those of the model; a traced module has one kind of block, the
average of its blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

from closeranks.facts.shapes.module_trace import ModuleTrace
from closeranks.facts.shapes.transformer import TransformerShape, block_params, flops_per_token
from closeranks.plan.step_time.workload import Workload


@dataclass(frozen=True, slots=True)
class ModelFigures:
    """FLOPs are those of forward and backward of one sample."""

    num_blocks: int
    flops: float
    block_flops: float
    """Of one block, on average."""
    last_flops: float
    """Of what comes after the blocks: the head."""
    attention_flops: float
    """Of all blocks."""
    block_params: float
    """Of one block, on average, without its routed experts."""
    routed_params: float
    first_params: float
    last_params: float
    """0 where the head is tied to the embedding."""
    tied_params: float
    hidden_numel: float
    """Elements of one sample's hidden state between two blocks."""
    expert_share: float = 0.0
    """Of the blocks."""
    is_traced: bool = False


def model_figures(workload: Workload) -> ModelFigures:
    if isinstance(workload.shape, ModuleTrace):
        return _of_trace(workload.shape)
    return _of_shape(workload.shape, workload.seq_len)


def _of_shape(shape: TransformerShape, seq_len: int) -> ModelFigures:
    flops = flops_per_token(shape, seq_len) * seq_len
    head = 6.0 * shape.head_params * seq_len
    share = shape.num_expert_layers / shape.num_layers
    routed = shape.num_experts * shape.expert_params
    mixed = (1 - share) * block_params(shape)
    if share:
        mixed += share * (block_params(shape, is_expert=True) - routed)
    return ModelFigures(
        shape.num_layers,
        flops,
        (flops - head) / shape.num_layers,
        head,
        12.0 * shape.num_layers * shape.attention_dim * seq_len * seq_len,
        mixed,
        share * routed,
        shape.head_params + shape.learned_positions * shape.dim,
        0.0 if shape.tied else shape.head_params,
        shape.head_params if shape.tied else 0.0,
        float(shape.dim) * seq_len,
        share,
    )


def _of_trace(trace: ModuleTrace) -> ModelFigures:
    """A module without repeated blocks is one block, and cannot be cut."""
    blocks = list(trace.blocks) or list(trace.units)
    num_blocks = len(blocks) if any(unit.is_block for unit in trace.units) else 1
    ends = [] if num_blocks == 1 and not any(unit.is_block for unit in trace.units) else trace.units
    rest = [unit for unit in ends if not unit.is_block]
    flops = sum(unit.forward_flops + unit.backward_flops for unit in blocks)
    return ModelFigures(
        num_blocks,
        trace.flops_per_sample,
        flops / num_blocks,
        sum(unit.forward_flops + unit.backward_flops for unit in rest),
        sum(3.0 * unit.attention_flops for unit in blocks),
        sum(unit.num_params for unit in blocks) / num_blocks,
        0.0,
        0.0,
        float(sum(unit.num_params for unit in rest)),
        0.0,
        sum(unit.output_bytes for unit in blocks) / num_blocks / (2 if trace.precision in ("bf16", "fp16") else 4),
        is_traced=True,
    )
