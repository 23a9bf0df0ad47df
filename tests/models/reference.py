"""A Llama written a second time, with loops instead of kernels, to hold the real one against."""

from __future__ import annotations

from collections.abc import Mapping
from math import cos, exp, log, pi, sin, sqrt

import torch
from torch import Tensor

from closeranks.facts.shapes.llama import LlamaShape


def angle(shape: LlamaShape, position: int, pair: int) -> float:
    frequency = 1.0 / shape.rope_theta ** (2 * pair / shape.head_dim)
    if shape.rope_factor != 1.0:
        wavelength = 2 * pi / frequency
        low = shape.rope_original_len / shape.rope_low_freq_factor
        high = shape.rope_original_len / shape.rope_high_freq_factor
        if wavelength > low:
            frequency /= shape.rope_factor
        elif wavelength > high:
            smooth = (shape.rope_original_len / wavelength - shape.rope_low_freq_factor) / (
                shape.rope_high_freq_factor - shape.rope_low_freq_factor
            )
            frequency = (1 - smooth) * frequency / shape.rope_factor + smooth * frequency
    return position * frequency


def turned(head: list[float], shape: LlamaShape, position: int) -> list[float]:
    half = shape.head_dim // 2
    result = [0.0] * shape.head_dim
    for pair in range(half):
        c, s = cos(angle(shape, position, pair)), sin(angle(shape, position, pair))
        result[pair] = head[pair] * c - head[pair + half] * s
        result[pair + half] = head[pair + half] * c + head[pair] * s
    return result


def normed(rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.stack([row / sqrt(float((row**2).mean()) + eps) * weight for row in rows])


def attention(rows: Tensor, weights: Mapping[str, Tensor], prefix: str, shape: LlamaShape) -> Tensor:
    size, num_shared = shape.head_dim, shape.num_heads // shape.num_kv_heads
    queries, keys, values = (rows @ weights[f"{prefix}.{name}_proj.weight"].T for name in "qkv")
    mixed = torch.zeros(len(rows), shape.dim, dtype=rows.dtype)
    for head in range(shape.num_heads):
        group = head // num_shared
        own, shared = slice(head * size, (head + 1) * size), slice(group * size, (group + 1) * size)
        for here in range(len(rows)):
            query = turned(queries[here, own].tolist(), shape, here)
            scores = []
            for there in range(here + 1):
                key = turned(keys[there, shared].tolist(), shape, there)
                scores.append(sum(a * b for a, b in zip(query, key, strict=True)) / sqrt(size))
            top = max(scores)
            total = sum(exp(score - top) for score in scores)
            for there, score in enumerate(scores):
                mixed[here, own] += exp(score - top) / total * values[there, shared]
    return mixed @ weights[f"{prefix}.o_proj.weight"].T


@torch.no_grad()
def logits(tokens: list[int], weights: Mapping[str, Tensor], shape: LlamaShape) -> Tensor:
    """Logits [positions, vocabulary] of one sequence."""
    rows = torch.stack([weights["model.embed_tokens.weight"][token] for token in tokens])
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}"
        before = normed(rows, weights[f"{prefix}.input_layernorm.weight"], shape.norm_eps)
        rows = rows + attention(before, weights, f"{prefix}.self_attn", shape)
        before = normed(rows, weights[f"{prefix}.post_attention_layernorm.weight"], shape.norm_eps)
        gate = before @ weights[f"{prefix}.mlp.gate_proj.weight"].T
        up = before @ weights[f"{prefix}.mlp.up_proj.weight"].T
        rows = rows + (gate / (1 + torch.exp(-gate)) * up) @ weights[f"{prefix}.mlp.down_proj.weight"].T
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    return normed(rows, weights["model.norm.weight"], shape.norm_eps) @ head.T


def summed_loss(tokens: list[int], weights: Mapping[str, Tensor], shape: LlamaShape) -> float:
    total = 0.0
    for row, target in zip(logits(tokens[:-1], weights, shape).tolist(), tokens[1:], strict=True):
        top = max(row)
        total += log(sum(exp(value - top) for value in row)) + top - row[target]
    return total
