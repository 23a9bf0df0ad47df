"""What is a Llama to us: its module, its loss, and how a run may cut it?

Names and numbers follow Hugging Face's Llama (rotate-half positions, float32 norms), so that published weights load
without renaming. Invariant: the blocks under ``model.layers`` are self-contained (hidden states and rotary tables in,
hidden states out): the units of compile, recompute, sharding and pipeline stages.
"""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from closeranks.core.errors import ModelError
from closeranks.core.protocols import Batch, Loss, ShardingRule
from closeranks.facts.llama import LlamaShape, flops_per_token, rope_frequencies
from closeranks.models.attention import attend
from closeranks.models.batches import take
from closeranks.models.catalog import MODELS
from closeranks.models.config import LlamaConfig
from closeranks.models.fill import fill_constant, fill_normal
from closeranks.models.linear import Linear

INIT_STD = 0.02


class RMSNorm(nn.Module):
    """Scale to unit root mean square. Sums in float32 at least: squares of bf16 lose what the mean is made of."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        wide = hidden if hidden.dtype == torch.float64 else hidden.float()
        scaled = wide * torch.rsqrt((wide * wide).mean(dim=-1, keepdim=True) + self.eps)
        return (scaled * self.weight).to(hidden.dtype)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (i, i + half) of [batch, positions, heads, head size] by its position's angle.

    Computed in the tables' precision and cast back once: bf16 angles would blur positions beyond a few hundred.
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

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        # -1, not the shape's count: under tensor parallelism this rank holds a share of the heads.
        split = (*hidden.shape[:2], -1, self.head_dim)
        queries = rotate(self.q_proj(hidden).view(split), cos, sin)
        keys = rotate(self.k_proj(hidden).view(split), cos, sin)
        values = self.v_proj(hidden).view(split)
        mixed = attend(queries.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), self.attention)
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

    def __init__(self, shape: LlamaShape, dropout: float, attention: str) -> None:
        super().__init__()
        self.self_attn = Attention(shape, attention)
        self.mlp = FeedForward(shape)
        self.input_layernorm = RMSNorm(shape.dim, shape.norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.dim, shape.norm_eps)
        self.dropout = dropout

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        hidden = hidden + self._dropped(self.self_attn(self.input_layernorm(hidden), cos, sin))
        return hidden + self._dropped(self.mlp(self.post_attention_layernorm(hidden)))

    def _dropped(self, change: Tensor) -> Tensor:
        return F.dropout(change, self.dropout, self.training) if self.dropout else change


class Decoder(nn.Module):
    """Embedding, blocks and the last norm: tokens in, hidden states out."""

    rope_cos: Tensor
    rope_sin: Tensor

    def __init__(self, shape: LlamaShape, max_len: int, dropout: float, attention: str) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.dim)
        self.layers = nn.ModuleList(Block(shape, dropout, attention) for _ in range(shape.num_layers))
        self.norm = RMSNorm(shape.dim, shape.norm_eps)
        # They follow from the shape, so no checkpoint carries them.
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

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        if length > self.rope_cos.shape[0]:
            what = f"{length} positions are more than the {self.rope_cos.shape[0]} this model was built for"
            raise ModelError(what, "Set data.seq_len to the longest sequence.")
        hidden: Tensor = self.embed_tokens(tokens)
        # The residual stream in bf16 halves the traffic between the products. Not in fp16: its range is too short.
        device = hidden.device.type
        if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.bfloat16:
            hidden = hidden.bfloat16()
        cos, sin = self.rope_cos[:length], self.rope_sin[:length]
        for block in self.layers:
            hidden = block(hidden, cos, sin)
        normed: Tensor = self.norm(hidden)
        return normed


class TokenLoss(nn.Module):
    """Summed cross-entropy in float32 (float64 stays). A module of its own so that a run can compile it: fused, the
    cast of a 128k vocabulary's logits never reaches memory; eager, it is made once."""

    def forward(self, logits: Tensor, targets: Tensor, mask: Tensor | None = None) -> Tensor:
        flat = logits.flatten(0, 1)
        wide = flat if flat.dtype == torch.float64 else flat.float()
        if mask is None:
            return F.cross_entropy(wide, targets.flatten(), reduction="sum")
        each = F.cross_entropy(wide, targets.flatten(), reduction="none")
        return (each * mask.flatten().to(each.dtype)).sum()


class Llama(nn.Module):
    """Tokens [batch, positions] in, logits out; with targets, the summed loss."""

    def __init__(self, shape: LlamaShape, *, max_len: int, dropout: float = 0.0, attention: str = "auto") -> None:
        super().__init__()
        self.tied = shape.tied
        self.model = Decoder(shape, max_len, dropout, attention)
        self.lm_head = Linear(shape.dim, shape.vocab_size)
        self.token_loss = TokenLoss()
        self.tie()

    def tie(self) -> None:
        """Make the output projection the embedding itself, where the shape says so."""
        if self.tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Llama:
        """Moving from the meta device gives every name a tensor of its own, which would cut the tie."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.tie()
        return self

    def forward(self, tokens: Tensor, targets: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        logits: Tensor = self.lm_head(self.model(tokens))
        if targets is None:
            return logits
        total: Tensor = self.token_loss(logits, targets, mask)
        return total


class LlamaSpec:
    """A Llama as a run sees it (``core.protocols.ModelSpec``)."""

    def __init__(self, config: LlamaConfig, seq_len: int) -> None:
        self.config = config
        self.shape = config.shape()
        self.name = "llama"
        self.metrics: tuple[str, ...] = ()
        self.builds_on_meta = True
        self.item = "token"
        self.items_per_sample = seq_len
        self.flops_per_item = flops_per_token(self.shape, seq_len)
        self.blocks = tuple(f"model.layers.{layer}" for layer in range(self.shape.num_layers))
        self.compile_units = (*self.blocks, "model.norm", "token_loss")
        self.sharding_rules = SHARDING_RULES

    def build(self) -> nn.Module:
        return Llama(
            self.shape,
            max_len=self.items_per_sample,
            dropout=self.config.dropout,
            attention=self.config.attention,
        )

    def init_parameter(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        """Projections back into the residual stream start smaller, so that its size does not grow with depth."""
        if "norm" in name:
            fill_constant(parameter, 1.0)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            fill_normal(parameter, INIT_STD / sqrt(2 * self.shape.num_layers), generator)
        else:
            fill_normal(parameter, INIT_STD, generator)

    def init_buffers(self, module: nn.Module) -> None:
        """Fill the rotary tables, and tie again in case the parameters were put in place one by one."""
        assert isinstance(module, Llama)
        module.model.fill_rope()
        module.tie()

    def loss(self, module: nn.Module, batch: Batch) -> Loss:
        """``tokens`` [B, S+1]: each position predicts the next. An optional ``mask`` [B, S] weighs the targets."""
        tokens = take(batch, "tokens", self.name).long()
        mask: Tensor | None = batch.get("mask")
        targets = tokens[:, 1:]
        try:
            total = module(tokens[:, :-1], targets, mask)
        except IndexError as error:
            what = f"a token id lies outside the model's vocabulary of {self.shape.vocab_size}"
            raise ModelError(what, "Set model.vocab_size to the tokenizer's size (256 for bytes).") from error
        return Loss(total=total, weight=float(targets.numel()) if mask is None else mask.sum())


SHARDING_RULES = (
    ShardingRule("model.embed_tokens.weight", 0),
    ShardingRule("model.layers.*.self_attn.[qkv]_proj.weight", 0),
    ShardingRule("model.layers.*.self_attn.o_proj.weight", 1),
    ShardingRule("model.layers.*.mlp.gate_proj.weight", 0),
    ShardingRule("model.layers.*.mlp.up_proj.weight", 0),
    ShardingRule("model.layers.*.mlp.down_proj.weight", 1),
    ShardingRule("*norm.weight", None),
    ShardingRule("lm_head.weight", 0),
)
"""Columns of what reads the residual stream, rows of what writes it; patterns as in fnmatch, the first match counts."""


@MODELS.register("llama")
def llama_spec(config: LlamaConfig, *, seq_len: int) -> LlamaSpec:
    if seq_len < 1:
        raise ModelError(
            "a Llama reads sequences, and this data has no seq_len", "Set data.seq_len, or name text data."
        )
    return LlamaSpec(config, seq_len)
