"""What follows from the shape of any transformer (GPT, Llama, mixture of experts): parameters, units and FLOPs.

``LlamaShape`` describes the model that this package trains; this shape also describes models of others, which can only
be planned. Invariant: for a Llama both give the same parameters and the same FLOPs.
"""

from __future__ import annotations

from dataclasses import dataclass

from closeranks.facts.shapes.llama import LlamaShape


@dataclass(frozen=True, slots=True)
class TransformerShape:
    num_layers: int
    dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_dim: int
    vocab_size: int
    gated: bool = True
    """Whether the feed-forward has a gate (SwiGLU: three matrices), else two matrices (GPT)."""
    tied: bool = False
    num_experts: int = 0
    experts_per_token: int = 0
    expert_ffn_dim: int = 0
    num_shared_experts: int = 0
    num_dense_layers: int = 0
    """Of a mixture of experts: layers with a dense feed-forward."""
    learned_positions: int = 0
    """Rows of a table of learned positions; 0: rotary or none."""
    is_causal: bool = True
    """Whether a position sees only those before it; in an encoder every one sees all."""

    @property
    def attention_dim(self) -> int:
        """Width of the queries of all heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def num_ffn_matrices(self) -> int:
        return 3 if self.gated else 2

    @property
    def num_expert_layers(self) -> int:
        return self.num_layers - self.num_dense_layers if self.num_experts else 0

    @property
    def attention_params(self) -> int:
        """Weights of one block's four attention matrices."""
        return 2 * self.dim * (self.attention_dim + self.kv_dim)

    @property
    def dense_ffn_params(self) -> int:
        return self.num_ffn_matrices * self.dim * self.ffn_dim

    @property
    def expert_params(self) -> int:
        """Weights of one expert."""
        return self.num_ffn_matrices * self.dim * (self.expert_ffn_dim or self.ffn_dim)

    @property
    def head_params(self) -> int:
        """Weights of the output projection, tied or not."""
        return self.dim * self.vocab_size


def from_llama(shape: LlamaShape) -> TransformerShape:
    return TransformerShape(
        shape.num_layers,
        shape.dim,
        shape.num_heads,
        shape.num_kv_heads,
        shape.head_dim,
        shape.ffn_dim,
        shape.vocab_size,
        tied=shape.tied,
    )


def block_params(shape: TransformerShape, *, is_expert: bool = False) -> int:
    """All weights of one block, its two norms included."""
    matrices = shape.attention_params + 2 * shape.dim
    if not is_expert:
        return matrices + shape.dense_ffn_params
    num_experts = shape.num_experts + shape.num_shared_experts
    return matrices + num_experts * shape.expert_params + shape.dim * shape.num_experts


def num_params(shape: TransformerShape) -> int:
    num_dense = shape.num_layers - shape.num_expert_layers
    blocks = num_dense * block_params(shape) + shape.num_expert_layers * block_params(shape, is_expert=True)
    embeddings = shape.head_params * (1 if shape.tied else 2) + shape.learned_positions * shape.dim
    return blocks + embeddings + shape.dim


def num_active_params(shape: TransformerShape) -> int:
    """Matrix weights that one token is multiplied with: of the experts only those it is sent to."""
    num_dense = shape.num_layers - shape.num_expert_layers
    active = (shape.experts_per_token + shape.num_shared_experts) * shape.expert_params
    routed = shape.num_expert_layers * (active + shape.dim * shape.num_experts)
    return shape.num_layers * shape.attention_params + num_dense * shape.dense_ffn_params + routed + shape.head_params


def attention_flops_per_token(shape: TransformerShape, seq_len: int) -> float:
    """Forward and backward of attention's two products: every query with every key."""
    return float(12 * shape.num_layers * shape.attention_dim * seq_len)


def flops_per_token(shape: TransformerShape, seq_len: int) -> float:
    """Model FLOPs of forward and backward for one token, in the convention of ``facts.shapes.llama``: six per active
    matrix weight, attention in full. For a causal count subtract half of ``attention_flops_per_token``."""
    return 6.0 * num_active_params(shape) + attention_flops_per_token(shape, seq_len)


def shape_problems(shape: TransformerShape) -> tuple[str, ...]:
    """Why no model can have this shape, one sentence each; empty when it can."""
    sizes = ("num_layers", "dim", "num_heads", "num_kv_heads", "head_dim", "ffn_dim", "vocab_size")
    problems = [f"{name} is {getattr(shape, name)}" for name in sizes if getattr(shape, name) < 1]
    if not problems and shape.num_heads % shape.num_kv_heads:
        problems.append(f"{shape.num_heads} heads cannot share {shape.num_kv_heads} key-value heads evenly")
    if shape.num_experts and not 1 <= shape.experts_per_token <= shape.num_experts:
        problems.append(f"a token cannot use {shape.experts_per_token} of {shape.num_experts} experts")
    if not 0 <= shape.num_dense_layers <= shape.num_layers:
        problems.append(f"{shape.num_dense_layers} of {shape.num_layers} layers cannot be dense")
    return tuple(problems)
