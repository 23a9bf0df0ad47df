"""The modules of a Llama.

Names and numerics follow Hugging Face's Llama (rotate-half positions, float32 norms), so that published weights load
without renaming. Invariants: the blocks under ``model.layers`` are self-contained (hidden states and rotary tables in,
hidden states out), so that they are the units of compile, recompute, sharding and pipeline stages; every module works
on the shard it is given (of the heads, the sequence, the vocabulary), and modules of other stages may be None.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from closeranks.core.errors import ModelError
from closeranks.facts.shapes.llama import LlamaShape, rope_frequencies
from closeranks.models.llama.attention import attend
from closeranks.models.llama.document_mask import DocumentAttention, document_attention
from closeranks.models.llama.linear import Linear
from closeranks.models.llama.tensor_axis import TensorAxis
from closeranks.models.llama.vocab_parallel_loss import vocab_parallel_cross_entropy
from closeranks.models.unit_rng import seed_unit, unit_rng


class RMSNorm(nn.Module):
    """Scale to unit root mean square. Sums in float32 at least: squares in bf16 are too imprecise for the mean."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        wide = hidden if hidden.dtype == torch.float64 else hidden.float()
        scaled = wide * torch.rsqrt((wide * wide).mean(dim=-1, keepdim=True) + self.eps)
        return (scaled * self.weight).to(hidden.dtype)


def apply_rotary(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (i, i + half) of [batch, positions, heads, head size] by its position's angle.

    Computed in the tables' precision and cast back once: bf16 angles cannot tell positions beyond a few hundred apart.
    """
    first, second = heads.chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(heads.dtype)


class Attention(nn.Module):
    """Grouped-query causal self-attention."""

    def __init__(self, shape: LlamaShape, attention: str) -> None:
        super().__init__()
        kv_dim = shape.num_kv_heads * shape.head_dim
        self.q_proj = Linear(shape.dim, shape.dim)
        self.k_proj = Linear(shape.dim, kv_dim)
        self.v_proj = Linear(shape.dim, kv_dim)
        self.o_proj = Linear(shape.dim, shape.dim)
        self.head_dim = shape.head_dim
        self.attention = attention

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, bias: Tensor | None = None) -> Tensor:
        """``cos`` and ``sin`` by position, for all rows or for each; ``bias`` masks attention between documents."""
        # -1, not the configured number: under tensor parallelism this rank holds a shard of the heads.
        split = (*hidden.shape[:2], -1, self.head_dim)
        # Here, not in the decoder: blocks pass on a shard of the sequence; only attention sees its whole length.
        cos, sin = cos[..., : hidden.shape[1], :], sin[..., : hidden.shape[1], :]
        queries = apply_rotary(self.q_proj(hidden).view(split), cos, sin)
        keys = apply_rotary(self.k_proj(hidden).view(split), cos, sin)
        values = self.v_proj(hidden).view(split)
        mixed = attend(queries.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), self.attention, bias)
        output: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return output


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.gate_proj = Linear(shape.dim, shape.ffn_dim)
        self.up_proj = Linear(shape.dim, shape.ffn_dim)
        self.down_proj = Linear(shape.ffn_dim, shape.dim)

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return output


class Block(nn.Module):
    """Attention and feed-forward, each added to the residual stream."""

    tensor_axis: TensorAxis | None = None
    """Set where the hidden states between blocks are this rank's shard of the sequence."""

    def __init__(self, shape: LlamaShape, dropout: float, attention: str) -> None:
        super().__init__()
        self.self_attn = Attention(shape, attention)
        self.mlp = FeedForward(shape)
        self.input_layernorm = RMSNorm(shape.dim, shape.norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.dim, shape.norm_eps)
        self.dropout = dropout

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, bias: Tensor | None = None) -> Tensor:
        hidden = hidden + self._dropped(self.self_attn(self.input_layernorm(hidden), cos, sin, bias))
        return hidden + self._dropped(self.mlp(self.post_attention_layernorm(hidden)))

    def _dropped(self, change: Tensor) -> Tensor:
        if not (self.dropout and self.training):
            return change
        if self.tensor_axis is None:
            return F.dropout(change, self.dropout)
        # Draw the mask of the whole sequence and take this rank's shard: the same elements are dropped as in a single
        # process, at the price of a transient tensor of that size.
        length, rank = change.shape[1], self.tensor_axis.rank
        whole = (change.shape[0], length * self.tensor_axis.size, *change.shape[2:])
        return change * F.dropout(change.new_ones(whole), self.dropout).narrow(1, rank * length, length)


class Decoder(nn.Module):
    """Embedding, blocks and the last norm: tokens in, hidden states out."""

    rope_cos: Tensor
    rope_sin: Tensor

    def __init__(self, shape: LlamaShape, max_len: int, dropout: float, attention: str) -> None:
        super().__init__()
        self.shape = shape
        self.dropout = dropout
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.dim)
        self.layers = nn.ModuleList(Block(shape, dropout, attention) for _ in range(shape.num_layers))
        self.norm = RMSNorm(shape.dim, shape.norm_eps)
        # Derived from the shape, so not saved in checkpoints.
        self.register_buffer("rope_cos", torch.empty(max_len, shape.head_dim // 2), persistent=False)
        self.register_buffer("rope_sin", torch.empty(max_len, shape.head_dim // 2), persistent=False)
        self.fill_rope()

    @torch.no_grad()
    def fill_rope(self) -> None:
        """Angles in float64 on the CPU, so that every device and precision rounds the same numbers once."""
        positions = torch.arange(self.rope_cos.shape[0], dtype=torch.float64, device="cpu")
        frequencies = torch.tensor(rope_frequencies(self.shape), dtype=torch.float64, device="cpu")
        angles = torch.outer(positions, frequencies)
        self.rope_cos.copy_(angles.cos())
        self.rope_sin.copy_(angles.sin())

    def embed(self, tokens: Tensor) -> Tensor:
        """Unit 0: the residual stream as the blocks read it."""
        if tokens.shape[1] > self.rope_cos.shape[0]:
            what = f"{tokens.shape[1]} positions are more than the {self.rope_cos.shape[0]} this model was built for"
            raise ModelError(what, "Set data.seq_len to the longest sequence.")
        hidden: Tensor = self.embed_tokens(tokens)
        # A bf16 residual stream halves the memory traffic between the products. Not in fp16: its range is too small.
        device = hidden.device.type
        if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.bfloat16:
            hidden = hidden.bfloat16()
        return hidden

    def document_attention(self, documents: Tensor | None) -> DocumentAttention | None:
        """Rotary tables and attention bias for rows that hold several documents."""
        return None if documents is None else document_attention(documents, self.rope_cos, self.rope_sin)

    def run_block(self, layer: int, hidden: Tensor, attention: DocumentAttention | None = None) -> Tensor:
        """Unit ``layer + 1``: one block, with a random stream of its own if it draws random numbers."""
        tables = (self.rope_cos, self.rope_sin) if attention is None else attention
        with unit_rng(layer + 1) if self._draws else nullcontext():
            output: Tensor = self.layers[layer](hidden, *tables)
        return output

    def forward(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        hidden, attention = self.embed(tokens), self.document_attention(documents)
        for layer in range(len(self.layers)):
            hidden = self.run_block(layer, hidden, attention)
        if self._draws:  # so that a loop which never seeds does not repeat its dropout masks
            seed_unit(torch.default_generator.initial_seed(), len(self.layers) + 1)
        normed: Tensor = self.norm(hidden)
        return normed

    @property
    def _draws(self) -> bool:
        return self.dropout > 0 and self.training


class TokenLoss(nn.Module):
    """Summed cross-entropy in float32 (float64 stays). A module of its own so that a run can compile it: fused, the
    float32 logits of a 128k vocabulary are never written to memory; eager, they are written once."""

    tensor_axis: TensorAxis | None = None
    """Set where the logits are those of this rank's shard of the vocabulary."""

    def forward(self, logits: Tensor, targets: Tensor, mask: Tensor | None = None) -> Tensor:
        flat = logits.flatten(0, 1)
        if self.tensor_axis is not None:
            each = vocab_parallel_cross_entropy(flat, targets.flatten(), self.tensor_axis)
            return each.sum() if mask is None else (each * mask.flatten().to(each.dtype)).sum()
        wide = flat if flat.dtype == torch.float64 else flat.float()
        if mask is None:
            return F.cross_entropy(wide, targets.flatten(), reduction="sum")
        each = F.cross_entropy(wide, targets.flatten(), reduction="none")
        return (each * mask.flatten().to(each.dtype)).sum()


class Llama(nn.Module):
    """Tokens [batch, positions] in, logits out; with targets, the summed loss. ``documents`` as in
    ``document_mask``."""

    def __init__(self, shape: LlamaShape, *, max_len: int, dropout: float = 0.0, attention: str = "auto") -> None:
        super().__init__()
        self.tied = shape.tied
        self.model = Decoder(shape, max_len, dropout, attention)
        self.lm_head = Linear(shape.dim, shape.vocab_size)
        self.token_loss = TokenLoss()
        self.tie()

    def tie(self) -> None:
        """Make the output projection the embedding itself, where the shape says so and this stage holds both."""
        if self.tied and self.lm_head is not None and self.model.embed_tokens is not None:
            self.lm_head.weight = self.model.embed_tokens.weight

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Llama:
        """Restores the tie: moving from the meta device gives every name a tensor of its own."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.tie()
        return self

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        mask: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        logits: Tensor = self.lm_head(self.model(tokens, documents))
        if targets is None:
            return logits
        total: Tensor = self.token_loss(logits, targets, mask)
        return total
