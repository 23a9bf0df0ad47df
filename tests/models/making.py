"""Small modules with weights drawn the way a run draws them."""

from __future__ import annotations

import torch
from torch import nn

from closeranks.core.protocols import ModelSpec
from closeranks.core.seeds import derive_seed
from closeranks.models.config import LlamaConfig
from closeranks.models.llama.spec import Llama, LlamaSpec


def materialised(spec: ModelSpec, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Built on the meta device, moved, and filled parameter by parameter."""
    with torch.device("meta"):
        module = spec.build()
    module = module.to(dtype).to_empty(device="cpu")
    for name, parameter in module.named_parameters():
        spec.init_parameter(name, parameter, torch.Generator().manual_seed(derive_seed(seed, "init", name)))
    spec.init_buffers(module)
    return module


def small_llama(dtype: torch.dtype = torch.float64, seq_len: int = 16, **overrides: object) -> tuple[LlamaSpec, Llama]:
    """Two layers, four heads over two key-value heads, weights large enough for attention to matter."""
    shape: dict[str, object] = {
        "dim": 32,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "ffn_dim": 48,
        "vocab_size": 40,
        "rope_theta": 100.0,
    }
    spec = LlamaSpec(LlamaConfig.model_validate(shape | overrides), seq_len)
    module = materialised(spec, dtype=dtype)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(10 if parameter.ndim == 2 else 1)
    assert isinstance(module, Llama)
    return spec, module


def tokens(batch: int, length: int, vocab_size: int = 40, seed: int = 3) -> torch.Tensor:
    return torch.randint(vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))
