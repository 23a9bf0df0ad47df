"""Chooses the attention kernel for a device and calls it.

The choice is made inside the block's forward, because a compiled block picks its kernel while it is traced. Invariant:
every choice computes the same causal, grouped-query attention; only speed, memory and the last bits differ. Where rows
hold several documents, a bias masks attention between them (``document_mask``).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from closeranks.core.errors import ModelError

# In order of preference on CUDA: cuDNN is the fastest on Hopper at head sizes 64 and 128; it refuses float32,
# deterministic mode and old devices, where the next in line takes over.
_BACKENDS = {
    "auto": [
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
    ],
    "cudnn": [SDPBackend.CUDNN_ATTENTION],
    "flash": [SDPBackend.FLASH_ATTENTION],
    "math": [SDPBackend.MATH],
}
_HALF = (torch.bfloat16, torch.float16)


def attend(queries: Tensor, keys: Tensor, values: Tensor, attention: str, bias: Tensor | None = None) -> Tensor:
    """Causal attention over [batch, heads, positions, head size]; keys and values may have fewer heads.

    ``bias`` [batch, 1, positions, positions] is added to the scores of all heads, and includes the causal mask.
    """
    if bias is not None:
        return _attend_documents(queries, keys, values, attention, bias.to(queries.dtype))
    if queries.device.type != "cuda" and attention == "auto":
        # torch's fused CPU kernel takes 2 to 4 times as long as the plain one in half precision (seen in 2.13).
        if queries.dtype not in _HALF:
            return _attend(queries, keys, values)
        attention = "math"
    with sdpa_kernel(_BACKENDS[attention], set_priority=True):
        return _attend(queries, keys, values)


def _attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    num_shared = queries.shape[1] // keys.shape[1]
    if num_shared == 1:
        return F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
    if queries.device.type == "cuda" and queries.dtype not in _HALF:
        # The only fused CUDA kernel for float32 needs as many key-value heads as query heads; without this copy torch
        # would fall back to the kernel that holds all scores in memory.
        keys, values = (heads.repeat_interleave(num_shared, dim=1) for heads in (keys, values))
        return F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
    return F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)


def _attend_documents(queries: Tensor, keys: Tensor, values: Tensor, attention: str, bias: Tensor) -> Tensor:
    if queries.device.type != "cuda":
        return _attend_biased(queries, keys, values, bias)
    if attention == "flash":
        what = 'model.attention = "flash" cannot separate documents that share a row: that kernel takes no mask'
        raise ModelError(what, 'Set model.attention = "auto", or data.packing = "stream".')
    with sdpa_kernel(_BACKENDS[attention], set_priority=True):
        return _attend_biased(queries, keys, values, bias)


def _attend_biased(queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor) -> Tensor:
    num_shared = queries.shape[1] // keys.shape[1]
    if num_shared > 1:
        # cuDNN accepts shared heads with a bias; where it refuses, the next fused kernel needs as many key-value heads
        # as query heads: without this copy torch would hold all scores in memory. It costs 3 % (H200, bf16, 4096
        # positions).
        keys, values = (heads.repeat_interleave(num_shared, dim=1) for heads in (keys, values))
    return F.scaled_dot_product_attention(queries, keys, values, attn_mask=bias)
