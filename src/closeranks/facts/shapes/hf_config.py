"""Which shape of a transformer does a Hugging Face ``config.json`` describe? For planning, without transformers.

Read are families whose blocks are alike and follow one another. Invariant: every number comes from the file or is the
family's own default; what is not known as a stack of such blocks is refused in a sentence that says what to do.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from closeranks.core.errors import ModelError
from closeranks.core.registry import did_you_mean
from closeranks.facts.shapes.transformer import TransformerShape, shape_problems

_LARGEST_BYTES = 1 << 20
_OWN_MODULE = (
    'Build the model in a factory of your own (model.name = "package.module:factory") and plan that job: it is traced.'
)


@dataclass(frozen=True, slots=True)
class _Family:
    """Where a family keeps its numbers, and what it is without saying so."""

    gated: bool = True
    tied: bool = False
    keys: Mapping[str, str] = field(default_factory=dict)
    """Where it has names of its own."""
    positions: str = ""
    """The key of the number of learned positions."""
    experts: str = ""
    """The key of the number of experts."""
    expert_ffn: str = ""
    head_dim: int = 0
    """Where it is not width over heads."""
    is_encoder: bool = False
    """Whether every position sees all others, unless the file says that it is a decoder."""


_USUAL = {
    "dim": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "ffn_dim": "intermediate_size",
    "vocab_size": "vocab_size",
}
_GPT2 = {"dim": "n_embd", "num_layers": "n_layer", "num_heads": "n_head", "ffn_dim": "n_inner"}
_BERT = _Family(gated=False, tied=True, positions="max_position_embeddings", is_encoder=True)
_FAMILIES = {
    "llama": _Family(),
    "mistral": _Family(),
    "qwen2": _Family(),
    "qwen3": _Family(head_dim=128),
    "phi3": _Family(),
    "olmo2": _Family(),
    "gemma": _Family(tied=True, head_dim=256),
    "gemma2": _Family(tied=True, head_dim=256),
    "mixtral": _Family(experts="num_local_experts"),
    "qwen3_moe": _Family(experts="num_experts", expert_ffn="moe_intermediate_size", head_dim=128),
    "gpt2": _Family(gated=False, tied=True, keys=_GPT2, positions="n_positions"),
    "gpt_neox": _Family(gated=False),
    "bert": _BERT,
    "roberta": _BERT,
}
_OTHER = {
    "t5": "an encoder and a decoder",
    "mt5": "an encoder and a decoder",
    "bart": "an encoder and a decoder",
    "whisper": "an encoder and a decoder",
    "vit": "patches of images instead of tokens",
    "clip": "two towers, one of them for images",
    "mamba": "no attention",
}


def read_hf_config(path: Path) -> TransformerShape:
    """``path``: of the file, or of the folder that it is in."""
    path = path / "config.json" if path.is_dir() else path
    again = "Name a config.json of a Hugging Face model, or its folder."
    try:
        with path.open("rb") as file:
            content = file.read(_LARGEST_BYTES + 1)
        if len(content) > _LARGEST_BYTES:
            raise ModelError(f"{path} is larger than any config.json", again)
        values = json.loads(content)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}", again) from error
    except (ValueError, RecursionError) as error:  # neither JSON nor text
        raise ModelError(f"{path} is not JSON", again) from error
    if not isinstance(values, dict):
        raise ModelError(f"{path} holds no table of values", again)
    return transformer_of(values, path.name)


def transformer_of(config: Mapping[str, Any], name: str = "config.json") -> TransformerShape:
    """``name`` is what errors call it."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in _FAMILIES:
        raise ModelError(*_refusal(kind, name))
    family = _FAMILIES[kind]
    keys = {**_USUAL, **family.keys}
    sizes = {ours: _size(config, keys[ours], name) for ours in ("dim", "num_layers", "num_heads", "vocab_size")}
    head_dim = family.head_dim or sizes["dim"] // sizes["num_heads"]
    if config.get("head_dim") is None and not family.head_dim and sizes["dim"] % sizes["num_heads"]:
        what = f"{name} says {keys['dim']} = {sizes['dim']}, which {sizes['num_heads']} heads cannot share evenly"
        raise ModelError(what, "Fix the file.")
    num_experts = _size(config, family.experts, name) if family.experts else 0
    shape = TransformerShape(
        **sizes,
        num_kv_heads=_size(config, keys["num_kv_heads"], name, sizes["num_heads"]),
        head_dim=_size(config, "head_dim", name, head_dim),
        ffn_dim=_size(config, keys["ffn_dim"], name, 4 * sizes["dim"] if kind == "gpt2" else 0),
        gated=family.gated,
        tied=_flag(config, "tie_word_embeddings", name, default=family.tied),
        num_experts=num_experts,
        experts_per_token=_size(config, "num_experts_per_tok", name) if num_experts else 0,
        expert_ffn_dim=_size(config, family.expert_ffn, name) if family.expert_ffn else 0,
        num_dense_layers=_num_dense(config, sizes["num_layers"], name) if family.expert_ffn else 0,
        learned_positions=_size(config, family.positions, name) if family.positions else 0,
        is_causal=not family.is_encoder or _flag(config, "is_decoder", name, default=False),
    )
    if problems := shape_problems(shape):
        raise ModelError(f"{name} describes no model that can be built: {problems[0]}", "Fix the file.")
    return shape


def _num_dense(config: Mapping[str, Any], num_layers: int, name: str) -> int:
    """Layers without experts: those that are listed, and all but every so many."""
    every = _size(config, "decoder_sparse_step", name, 1)
    listed = config.get("mlp_only_layers") or ()
    if not isinstance(listed, (list, tuple)) or not all(type(layer) is int for layer in listed):
        raise ModelError(f"{name} says mlp_only_layers = {listed!r}, which is no list of layers", "Fix the file.")
    return sum(layer in listed or (layer + 1) % every != 0 for layer in range(num_layers))


def _refusal(kind: object, name: str) -> tuple[str, str]:
    if not isinstance(kind, str):
        said = "does not say its model_type" if kind is None else f"says model_type = {kind!r}, which is no name"
        return f"{name} {said}", "Name a config.json of a Hugging Face model."
    if kind in _OTHER:
        return (
            f"{name} is of a {kind}, which has {_OTHER[kind]}: no stack of equal blocks over one sequence",
            _OWN_MODULE,
        )
    near = did_you_mean(kind, _FAMILIES)
    return f"{name} says model_type = '{kind}', whose shape is not known here", f"{_OWN_MODULE} {near}".rstrip()


def _size(config: Mapping[str, Any], key: str, name: str, default: int = 0) -> int:
    """A positive whole number; ``default`` 0: the file must say it."""
    value = config.get(key)
    if value is None and default:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        what = f"{name} does not say {key}" if value is None else f"{name} says {key} = {value!r}, which is not a size"
        raise ModelError(what, "Fix the file, or download it again.")
    return value


def _flag(config: Mapping[str, Any], key: str, name: str, *, default: bool) -> bool:
    value = config.get(key, default)
    if not isinstance(value, bool):
        raise ModelError(f"{name} says {key} = {value!r}, which is neither true nor false", "Fix the file.")
    return value
