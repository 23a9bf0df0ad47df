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

from closeranks.facts.memory.state_bytes import NamedBytes, Precision, element_bytes
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

    @property
    def tokens_per_rank(self) -> int:
        """Tokens of a hidden state between the blocks, where the sequence is split over the tensor ranks."""
        return -(-self.num_tokens // self.tensor)


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
    """The gradient of the logits: in float32, with half precision also a half-precision copy, beside the logits; the
    loss of a sharded vocabulary has one more float32 copy. Compiled, only the gradient in its final dtype."""
    w = element_bytes(settings.precision)
    if settings.is_compiled:
        return settings.num_tokens * shape.vocab_size * w.compute // settings.tensor
    width = w.state * (1 if settings.tensor == 1 else 2) + (2 * w.compute if w.is_half else 0)
    return settings.num_tokens * shape.vocab_size * width // settings.tensor


def weight_cast_bytes(stage: LlamaStage, settings: ActivationSettings) -> int:
    """Half-precision copies of weights, which backward reads; recomputed blocks cast them again."""
    w = element_bytes(settings.precision)
    if not w.is_half:
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


def activation_memory(
    shape: LlamaShape, settings: ActivationSettings, stages: Sequence[LlamaStage], *, is_pipeline: bool
) -> tuple[NamedBytes, ...]:
    """Everything that one rank keeps of its micro-batches at the peak, by name, without empty parts."""
    blocks = sum(s.in_flight * s.num_blocks for s in stages) * block_saved_bytes(shape, settings)
    ends = sum(s.in_flight * embedding_saved_bytes(settings) for s in stages if s.is_first)
    ends += sum(s.in_flight * head_saved_bytes(shape, settings) for s in stages if s.is_last)
    hidden = settings.tokens_per_rank * shape.dim * element_bytes(settings.precision).stream
    # A stage keeps its input until the input's gradient is sent back, and its output until the output's gradient
    # arrives.
    boundaries = sum(s.in_flight * (2 - s.is_first - s.is_last) for s in stages) * hidden if is_pipeline else 0
    # Blocks are recomputed after the logits are freed: only the larger of the two counts.
    logits = head_working_bytes(shape, settings) if any(s.is_last for s in stages) else 0
    again = block_working_bytes(shape, settings) if any(s.num_blocks for s in stages) else 0
    parts = (
        NamedBytes("activations of blocks", blocks),
        NamedBytes("activations of embedding, head and loss", ends),
        NamedBytes("logits and their gradient", logits if logits >= again else 0),
        NamedBytes("one block computed again", again if again > logits else 0),
        NamedBytes("weights cast for products", sum(s.in_flight * weight_cast_bytes(s, settings) for s in stages)),
        NamedBytes("hidden states at the ends of stages", boundaries),
    )
    return tuple(part for part in parts if part.num_bytes)
