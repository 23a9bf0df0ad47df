"""What follows from the shape of a Llama: parameters, how they are sharded, FLOPs and rotary frequencies.

Invariant: ``parameter_shapes`` names exactly the parameters that ``models.llama`` builds, in Hugging Face's names, and
the published presets have the published number of parameters.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from math import pi, prod

from closeranks.facts.shapes.model_structure import ModelStructure, Rule, model_structure


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """Everything that defines a Llama except its weights."""

    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    ffn_dim: int
    vocab_size: int
    rope_theta: float = 500_000.0
    rope_factor: float = 1.0
    """The factor by which the trained context was extended; 1: not at all, and the three fields below are not used."""
    rope_low_freq_factor: float = 1.0
    rope_high_freq_factor: float = 4.0
    rope_original_len: int = 8192
    norm_eps: float = 1e-5
    tied: bool = False
    """Whether the output projection shares the embedding's weight."""

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads


PRESETS: dict[str, LlamaShape] = {
    # Divisible by every layout of up to eight ranks.
    "tiny": LlamaShape(dim=128, num_layers=8, num_heads=16, num_kv_heads=8, ffn_dim=256, vocab_size=256),
    # Reads bytes; learns to write Python-looking text on two CPU cores in half a minute.
    "small": LlamaShape(
        dim=160, num_layers=4, num_heads=4, num_kv_heads=2, ffn_dim=448, vocab_size=256, rope_theta=10_000.0
    ),
    "160m": LlamaShape(
        dim=768,
        num_layers=12,
        num_heads=12,
        num_kv_heads=12,
        ffn_dim=3072,
        vocab_size=32_000,
        rope_theta=10_000.0,
        norm_eps=1e-6,
    ),
    "1b": LlamaShape(2048, 16, 32, 8, 8192, 128_256, rope_factor=32.0, tied=True),
    "1b_untied": LlamaShape(2048, 16, 32, 8, 8192, 128_256, rope_factor=32.0),
    "3b": LlamaShape(3072, 28, 24, 8, 8192, 128_256, rope_factor=32.0, tied=True),
    "7b": LlamaShape(4096, 32, 32, 32, 11_008, 32_000, rope_theta=10_000.0),
    "8b": LlamaShape(4096, 32, 32, 8, 14_336, 128_256, rope_factor=8.0),
    "13b": LlamaShape(5120, 40, 40, 40, 13_824, 32_000, rope_theta=10_000.0),
    "70b": LlamaShape(8192, 80, 64, 8, 28_672, 128_256, rope_factor=8.0),
    "405b": LlamaShape(16_384, 126, 128, 8, 53_248, 128_256, rope_factor=8.0),
}


def shape_problems(shape: LlamaShape) -> tuple[str, ...]:
    """Why no model can have this shape, one sentence each; empty when it can."""
    problems = []
    if shape.dim % shape.num_heads:
        problems.append(f"dim {shape.dim} does not split into {shape.num_heads} heads")
    elif shape.head_dim % 2:
        problems.append(f"the head size {shape.head_dim} (dim / num_heads) is odd, and rotary positions need pairs")
    if shape.num_heads % shape.num_kv_heads:
        what = f"{shape.num_heads} heads cannot share {shape.num_kv_heads} key-value heads evenly"
        problems.append(f"{what}; num_kv_heads = {math.gcd(shape.num_heads, shape.num_kv_heads)} would do")
    if shape.rope_factor != 1.0 and shape.rope_low_freq_factor >= shape.rope_high_freq_factor:
        problems.append("rope_low_freq_factor must be below rope_high_freq_factor")
    return tuple(problems)


def block_shapes(shape: LlamaShape) -> dict[str, tuple[int, ...]]:
    """Names within one block, in the order of the module."""
    kv_dim = shape.num_kv_heads * shape.head_dim
    return {
        "self_attn.q_proj.weight": (shape.dim, shape.dim),
        "self_attn.k_proj.weight": (kv_dim, shape.dim),
        "self_attn.v_proj.weight": (kv_dim, shape.dim),
        "self_attn.o_proj.weight": (shape.dim, shape.dim),
        "mlp.gate_proj.weight": (shape.ffn_dim, shape.dim),
        "mlp.up_proj.weight": (shape.ffn_dim, shape.dim),
        "mlp.down_proj.weight": (shape.dim, shape.ffn_dim),
        "input_layernorm.weight": (shape.dim,),
        "post_attention_layernorm.weight": (shape.dim,),
    }


def parameter_shapes(shape: LlamaShape) -> dict[str, tuple[int, ...]]:
    """Name to shape, in the order of the module; a tied output projection is not a parameter of its own."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocab_size, shape.dim)}
    for layer in range(shape.num_layers):
        shapes.update({f"model.layers.{layer}.{name}": dims for name, dims in block_shapes(shape).items()})
    shapes["model.norm.weight"] = (shape.dim,)
    if not shape.tied:
        shapes["lm_head.weight"] = (shape.vocab_size, shape.dim)
    return shapes


SHARDING: tuple[Rule, ...] = (
    ("model.embed_tokens.weight", 0, False),
    ("model.layers.*.self_attn.[qkv]_proj.weight", 0, False),
    ("model.layers.*.self_attn.o_proj.weight", 1, False),
    ("model.layers.*.mlp.gate_proj.weight", 0, False),
    ("model.layers.*.mlp.up_proj.weight", 0, False),
    ("model.layers.*.mlp.down_proj.weight", 1, False),
    ("*norm.weight", None, True),
    ("lm_head.weight", 0, False),
)
"""Along the tensor axis: column-parallel where a module reads the residual stream, row-parallel where it writes it;
norms work on a shard of the sequence. Pattern as in fnmatch, sharded dim, whether a replicated parameter works on a
shard of the sequence."""


def block_names(shape: LlamaShape) -> tuple[str, ...]:
    return tuple(f"model.layers.{layer}" for layer in range(shape.num_layers))


def unit_names(shape: LlamaShape) -> tuple[str, ...]:
    """Modules in execution order, from which pipeline stages are formed."""
    return ("model.embed_tokens", *block_names(shape), "model.norm", "lm_head")


def unit_costs(shape: LlamaShape, seq_len: int) -> tuple[float, ...]:
    """FLOPs of forward and backward of each unit for one token, as ``flops_per_token`` counts them. Lookup and norm are
    memory-bound and count with their few operations."""
    matrices = sum(prod(dims) for dims in block_shapes(shape).values() if len(dims) == 2)
    block = float(6 * matrices + 12 * shape.dim * seq_len)
    ends = (float(shape.dim), float(6 * shape.dim), float(6 * shape.vocab_size * shape.dim))
    return (ends[0], *[block] * shape.num_layers, *ends[1:])


def llama_structure(shape: LlamaShape, seq_len: int) -> ModelStructure:
    return model_structure(
        parameter_shapes(shape),
        units=unit_names(shape),
        costs=unit_costs(shape, seq_len),
        blocks=block_names(shape),
        rules=SHARDING,
        ties={"lm_head.weight": "model.embed_tokens.weight"} if shape.tied else None,
    )


def num_params_per_block(shape: LlamaShape) -> int:
    return sum(prod(dims) for dims in block_shapes(shape).values())


def num_params(shape: LlamaShape) -> int:
    embeddings = shape.vocab_size * shape.dim * (1 if shape.tied else 2)
    return shape.num_layers * num_params_per_block(shape) + embeddings + shape.dim


def num_matmul_params(shape: LlamaShape) -> int:
    """Weights that multiply every token: matrices of the blocks and the output projection, not the lookup."""
    matrices = sum(prod(dims) for dims in block_shapes(shape).values() if len(dims) == 2)
    return shape.num_layers * matrices + shape.vocab_size * shape.dim


def flops_per_token(shape: LlamaShape, seq_len: int) -> float:
    """Model FLOPs of forward and backward for one token.

    Six for each matmul weight (two forward, four backward), and for attention's two products over the sequence
    12 * layers * heads * head size * seq_len: every query with every key (no causal discount), the convention in which
    torchtitan, nanotron and llm-foundry report MFU. Recompute is never counted.
    """
    attention = 12 * shape.num_layers * shape.num_heads * shape.head_dim * seq_len
    return float(6 * num_matmul_params(shape) + attention)


def recompute_flops_per_token(shape: LlamaShape, seq_len: int, recompute: str, keep: Collection[str]) -> float:
    """What activation recompute adds to ``flops_per_token``: the second forward of every block, without what is kept.

    A second forward ends once the last result that backward needs is there, so the last product of a block (the down
    projection) is not repeated.
    """
    if recompute == "none":
        return 0.0
    is_kept = recompute == "selective"
    shapes = {name: dims for name, dims in block_shapes(shape).items() if len(dims) == 2 and "down_proj" not in name}
    products = 0 if is_kept and "matmul" in keep else 2 * sum(prod(dims) for dims in shapes.values())
    attention = 0 if is_kept and "attention" in keep else 4 * shape.num_heads * shape.head_dim * seq_len
    return float(shape.num_layers * (products + attention))


def rope_frequencies(shape: LlamaShape) -> tuple[float, ...]:
    """Radians per position for each pair of a head's dims, with Llama 3.1's context extension.

    High frequencies (wavelength under original_len / high) are kept, low ones (over original_len / low) are divided by
    ``rope_factor``, and those between are blended linearly in turns per original context.
    """
    plain = [shape.rope_theta ** (-2 * pair / shape.head_dim) for pair in range(shape.head_dim // 2)]
    if shape.rope_factor == 1.0:
        return tuple(plain)
    return tuple(_stretched(frequency, shape) for frequency in plain)


def _stretched(frequency: float, shape: LlamaShape) -> float:
    low, high = shape.rope_low_freq_factor, shape.rope_high_freq_factor
    turns = shape.rope_original_len * frequency / (2 * pi)
    keep = min(1.0, max(0.0, (turns - low) / (high - low)))
    return keep * frequency + (1 - keep) * frequency / shape.rope_factor
