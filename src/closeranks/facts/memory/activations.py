"""Activation memory of a Llama: the bytes that a forward keeps for its backward.

Counted tensor by tensor from what ``models.llama.model`` makes autograd save when a fused kernel computes attention
(queries, keys, values, output and a row of sums). Compiled, norms and the loss save their inputs and no float32
intermediates: backward recomputes those. (In float64 runs read float64 for float32 throughout.) It is still an
estimate: allocators round up, kernels take workspace. Invariant: everything that grows with the micro-batch is counted
here, as what is kept per micro-batch in flight (``..._saved_bytes``) or as what one backward needs on top
(``..._working_bytes``).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from closeranks.facts.memory.peak import ActivationBytes
from closeranks.facts.memory.state_bytes import Precision, element_bytes
from closeranks.facts.pipeline.occupancy import BackwardSplitting
from closeranks.facts.shapes.llama import LlamaShape

Recompute = Literal["none", "selective", "full"]
Keep = Literal["attention", "matmul", "collective"]
KEEP_ALL: tuple[Keep, ...] = ("attention", "matmul", "collective")

_NUM_NORMS = 2
_NUM_READERS = 5
"""Matrix products that read a norm's output in a block: queries, keys, values; gate and up."""
_TOKEN_ID = 8


@dataclass(frozen=True, slots=True)
class ActivationSettings:
    """Settings of one micro-batch's forward and backward on a rank."""

    num_tokens: int
    """Samples times positions, before the tensor axis splits the positions."""
    precision: Precision = "float32"
    tensor: int = 1
    recompute: Recompute = "none"
    keep: Collection[Keep] = KEEP_ALL
    """The families of results that selective recompute keeps."""
    dropout: float = 0.0
    is_compiled: bool = False
    keeps_casts: bool = True
    """Whether half-precision copies of weights are kept for backward: not where ZeRO-3 frees weights in between."""

    @property
    def tokens_per_rank(self) -> int:
        """Tokens of a hidden state between the blocks, where the sequence is split over the tensor ranks."""
        return -(-self.num_tokens // self.tensor)

    @property
    def splitting(self) -> BackwardSplitting:
        """What becomes of a backward that the schedule splits ([Note: how a backward is split])."""
        if self.recompute != "none" or self.is_compiled:
            return "whole"
        return "late" if element_bytes(self.precision).is_half else "split"


def block_saved_bytes(shape: LlamaShape, settings: ActivationSettings) -> int:
    """What one block keeps of one micro-batch until its backward."""
    if settings.recompute == "none":
        return _block_whole(shape, settings)
    kept = element_bytes(settings.precision).stream * settings.tokens_per_rank * shape.dim
    return kept + (_block_chosen(shape, settings) if settings.recompute == "selective" else 0)


def block_working_bytes(shape: LlamaShape, settings: ActivationSettings) -> int:
    """What one block's backward needs beyond what was saved: with recompute, the activations of one block at a time."""
    if settings.recompute == "none":
        return 0
    return max(0, _block_whole(shape, settings) - block_saved_bytes(shape, settings))


def _block_whole(shape: LlamaShape, settings: ActivationSettings) -> int:
    w = element_bytes(settings.precision)
    norms = _NUM_NORMS * _norm_saved(shape, settings)
    # The inputs of products are all-gathered: the only activations in a block that the tensor axis does not split. In
    # fp16 each product casts a copy of its own, otherwise they share one.
    copies = _NUM_READERS if w.compute != w.stream else _NUM_NORMS
    read = copies * settings.num_tokens * shape.dim * w.compute
    heads = 2 * shape.dim + 2 * _kv_dim(shape)
    num_wide = 3 if settings.is_compiled else 4  # gate, up, their product; eager, the activated gate too
    within = settings.num_tokens * (heads + num_wide * shape.ffn_dim) * w.compute // settings.tensor
    # With tensor parallelism each rank draws the dropout mask of the whole sequence and keeps it as factors.
    mask = settings.num_tokens * shape.dim * (1 if settings.tensor == 1 else w.compute)
    masks = 2 * mask if settings.dropout else 0
    return norms + read + within + _row_sums(shape, settings) + masks


def _block_chosen(shape: LlamaShape, settings: ActivationSettings) -> int:
    """What selective recompute keeps: the results of operations, where a plain backward keeps inputs of products."""
    w, chosen = element_bytes(settings.precision), 0
    if "matmul" in settings.keep:
        split = shape.dim + 2 * _kv_dim(shape) + 2 * shape.ffn_dim
        # What goes back into the residual stream is still a partial sum over the tensor axis, so it is not split. The
        # compiler drops the second of them, which has no reader.
        num_back = 1 if settings.is_compiled else 2
        chosen += settings.num_tokens * (split // settings.tensor + num_back * shape.dim) * w.compute
    if "attention" in settings.keep:
        chosen += settings.num_tokens * shape.dim * w.compute // settings.tensor + _row_sums(shape, settings)
    if "collective" in settings.keep and settings.tensor > 1:
        gathered = settings.num_tokens * w.stream
        chosen += _NUM_NORMS * shape.dim * (gathered + settings.tokens_per_rank * w.compute)
    return chosen


def _norm_saved(shape: LlamaShape, settings: ActivationSettings) -> int:
    """A norm's input and its scaled copy, both float32, and one number per token; compiled, the input unconverted."""
    if settings.is_compiled:
        return settings.tokens_per_rank * shape.dim * element_bytes(settings.precision).stream
    return settings.tokens_per_rank * (2 * shape.dim + 1) * element_bytes(settings.precision).state


def _row_sums(shape: LlamaShape, settings: ActivationSettings) -> int:
    return settings.num_tokens * shape.num_heads * element_bytes(settings.precision).state // settings.tensor


def _kv_dim(shape: LlamaShape) -> int:
    return shape.num_kv_heads * shape.head_dim


def embedding_saved_bytes(settings: ActivationSettings) -> int:
    """What the embedding keeps: the token ids."""
    return settings.num_tokens * _TOKEN_ID


def head_saved_bytes(shape: LlamaShape, settings: ActivationSettings) -> int:
    """What the last norm, the output projection and the loss keep.

    Of the whole vocabulary the loss keeps float32 log-probabilities; of a shard of it, or compiled, the logits in their
    own dtype.
    """
    w = element_bytes(settings.precision)
    read = settings.num_tokens * shape.dim * w.compute
    width = w.state if settings.tensor == 1 and not settings.is_compiled else w.compute
    logits = settings.num_tokens * shape.vocab_size * width // settings.tensor
    sums = settings.num_tokens * w.state if settings.tensor > 1 else 0
    return _norm_saved(shape, settings) + read + logits + sums + settings.num_tokens * _TOKEN_ID


def head_working_bytes(shape: LlamaShape, settings: ActivationSettings) -> int:
    """The gradient of the logits while it is computed, beside what the loss kept: in float32, twice, since that of the
    log-probabilities comes first; the loss of a sharded vocabulary makes the probabilities anew, from a float32 copy of
    half-precision logits. Compiled, only the gradient in its final dtype."""
    w = element_bytes(settings.precision)
    if settings.is_compiled:
        return settings.num_tokens * shape.vocab_size * w.compute // settings.tensor
    width = 2 * w.state + (w.state + w.compute if settings.tensor > 1 and w.is_half else 0)
    return settings.num_tokens * shape.vocab_size * width // settings.tensor


def head_gradient_bytes(shape: LlamaShape, settings: ActivationSettings) -> int:
    """The gradient of the logits as the head's backward reads it."""
    return settings.num_tokens * shape.vocab_size * element_bytes(settings.precision).compute // settings.tensor


def block_gradient_bytes(shape: LlamaShape, settings: ActivationSettings) -> int:
    """Gradients of a block's own activations, in the feed-forward, where they are widest."""
    w = element_bytes(settings.precision)
    return 2 * settings.num_tokens * (shape.ffn_dim * w.compute // settings.tensor + shape.dim * w.stream)


def block_deferred_bytes(shape: LlamaShape, settings: ActivationSettings) -> int:
    """What a block records of one micro-batch for weight gradients that come later: the gradients of what its products
    and its norms return. In half precision those of products come at once."""
    w = element_bytes(settings.precision)
    norms = _NUM_NORMS * settings.tokens_per_rank * shape.dim * w.state
    if settings.splitting != "split":
        return norms if settings.splitting == "late" else 0
    split = (shape.dim + 2 * _kv_dim(shape) + 2 * shape.ffn_dim) // settings.tensor
    return norms + settings.num_tokens * (split + 2 * shape.dim) * w.compute


def late_freed_bytes(shape: LlamaShape, settings: ActivationSettings) -> int:
    """What a stage frees in the first half although its second half is to come: the feed-forward of its last block,
    which no norm's gradient needs."""
    if settings.splitting != "late":
        return 0
    w = element_bytes(settings.precision)
    wide = 4 * shape.ffn_dim // settings.tensor
    return settings.num_tokens * (wide + shape.dim) * w.compute + settings.tokens_per_rank * shape.dim * w.state


def end_deferred_bytes(shape: LlamaShape, settings: ActivationSettings) -> int:
    """The same of the first stage, of which the whole backward is deferred (the gradient of its output), and of the
    head (that of the last norm; that of the logits takes the place of what the loss kept)."""
    return settings.tokens_per_rank * shape.dim * element_bytes(settings.precision).state


def weight_cast_bytes(stage: LlamaStage, settings: ActivationSettings) -> int:
    """Half-precision copies of weights, which backward reads; recomputed blocks cast them again."""
    w = element_bytes(settings.precision)
    if not w.is_half or not settings.keeps_casts:
        return 0
    in_blocks = stage.num_block_params if settings.recompute == "none" else 0
    return (in_blocks + stage.num_head_params) * w.compute


@dataclass(frozen=True, slots=True)
class LlamaStage:
    """The part of a Llama in one stage of a pipeline rank, and its peak number of micro-batches in flight."""

    num_blocks: int
    is_first: bool
    is_last: bool
    in_flight: int
    num_block_params: int
    """Weights of the blocks' matrix products on one tensor rank."""
    num_head_params: int
    """The same for the output projection; 0 where another stage has it."""
    deferred: int = 0
    """Micro-batches of those in flight whose weight gradients are still to come."""

    def num_heads(self, settings: ActivationSettings) -> int:
        """Micro-batches of which head and loss keep something: where all gradients come in the first half of a
        backward, nothing needs them until the second."""
        return self.is_last * (self.in_flight - (self.deferred if settings.splitting == "late" else 0))


def activation_bytes(
    shape: LlamaShape, settings: ActivationSettings, stages: Sequence[LlamaStage], *, is_pipeline: bool
) -> ActivationBytes:
    """What one rank keeps of its micro-batches, and what their backward needs."""
    hidden = settings.tokens_per_rank * shape.dim * element_bytes(settings.precision).stream
    waits = stages and all(s.deferred == s.in_flight for s in stages)
    """Only second halves of backwards are left: the last loss was before."""
    has_head = any(s.is_last for s in stages) and not waits
    has_blocks = any(s.num_blocks for s in stages)
    ends = sum(s.in_flight * embedding_saved_bytes(settings) for s in stages if s.is_first)
    ends += sum(s.num_heads(settings) * head_saved_bytes(shape, settings) for s in stages)
    return ActivationBytes(
        blocks=sum(s.in_flight * s.num_blocks for s in stages) * block_saved_bytes(shape, settings),
        ends=ends,
        casts=sum(s.in_flight * weight_cast_bytes(s, settings) for s in stages),
        deferred=sum(s.deferred * _stage_deferred(shape, settings, s) for s in stages),
        is_late=settings.splitting == "late" and any(s.deferred for s in stages),
        # A stage keeps its input until the input's gradient is sent back, and its output until the output's gradient
        # arrives.
        borders=sum(s.in_flight * (2 - s.is_first - s.is_last) for s in stages) * hidden if is_pipeline else 0,
        head=head_saved_bytes(shape, settings) if has_head else 0,
        logits=head_working_bytes(shape, settings) if has_head else 0,
        logits_gradient=head_gradient_bytes(shape, settings) if has_head else 0,
        again=block_working_bytes(shape, settings) if has_blocks else 0,
        block_gradients=block_gradient_bytes(shape, settings) if has_blocks else 0,
    )


def _stage_deferred(shape: LlamaShape, settings: ActivationSettings, stage: LlamaStage) -> int:
    if stage.is_first:
        return end_deferred_bytes(shape, settings)
    head = end_deferred_bytes(shape, settings) if stage.is_last else 0
    kept = stage.num_blocks * block_deferred_bytes(shape, settings)
    return max(0, kept - late_freed_bytes(shape, settings)) + head
