"""Llamas as Hugging Face's transformers makes, saves and computes them: the other side of every exchange."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what its optional companions say while they are imported
    import transformers
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
    from transformers.models.llama import modeling_llama

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 300,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
STRETCHED = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
KINDS: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "all heads": {"num_key_value_heads": 4},
    "stretched": {"rope_parameters": STRETCHED},
    "tied and stretched": {"tie_word_embeddings": True, "rope_parameters": STRETCHED, "num_key_value_heads": 1},
}


def published(**changes: Any) -> LlamaForCausalLM:
    """Random weights, large enough for attention and norms to matter."""
    torch.manual_seed(11)
    model = LlamaForCausalLM(LlamaConfig(**{**SMALL, **changes})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.15 + (1.0 if parameter.ndim == 1 else 0.0))
    return model


def publish(model: LlamaForCausalLM, folder: Path, shard_size: str = "60KB") -> Path:
    model.save_pretrained(folder, max_shard_size=shard_size)
    return folder


def fetched(folder: Path) -> tuple[nn.Module, dict[str, Any]]:
    """What transformers loads, and what it has to say about it."""
    model, told = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    return model.eval(), told


def some_tokens(vocab_size: int = 300, length: int = 100) -> Tensor:
    return torch.randint(vocab_size, (2, length), generator=torch.Generator().manual_seed(2))


@torch.no_grad()
def logits_of(model: nn.Module, tokens: Tensor) -> Tensor:
    logits: Tensor = model(tokens).logits
    return logits


@contextmanager
def in_double() -> Iterator[None]:
    """transformers rounds norms and angles to float32 in every precision; here it does not."""
    norm, rope = modeling_llama.LlamaRMSNorm.forward, modeling_llama.LlamaRotaryEmbedding.forward

    def exact_norm(self: Any, hidden: Tensor) -> Tensor:
        variance = hidden.pow(2).mean(-1, keepdim=True)
        result: Tensor = self.weight * (hidden * torch.rsqrt(variance + self.variance_epsilon))
        return result

    def exact_rope(self: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None].double() * _frequencies(self.config)
        both = torch.cat((angles, angles), dim=-1)
        return both.cos(), both.sin()

    modeling_llama.LlamaRMSNorm.forward, modeling_llama.LlamaRotaryEmbedding.forward = exact_norm, exact_rope
    try:
        yield
    finally:
        modeling_llama.LlamaRMSNorm.forward, modeling_llama.LlamaRotaryEmbedding.forward = norm, rope


def _frequencies(config: Any) -> Tensor:
    """transformers' own formulas, with its one word for float32 read as float64."""
    from transformers import modeling_rope_utils

    kind = config.rope_parameters["rope_type"]
    if kind == "default":
        half = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
        return 1.0 / (config.rope_parameters["rope_theta"] ** half)
    plain = modeling_rope_utils.torch
    modeling_rope_utils.torch = _Doubled()
    try:
        frequencies: Tensor = modeling_rope_utils.ROPE_INIT_FUNCTIONS[kind](config)[0]
        return frequencies
    finally:
        modeling_rope_utils.torch = plain


class _Doubled:
    """torch, but for its word for float32."""

    def __getattr__(self, name: str) -> Any:
        return torch.float64 if name == "float" else getattr(torch, name)
