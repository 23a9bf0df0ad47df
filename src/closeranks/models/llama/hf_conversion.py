"""Converts between our Llama and Hugging Face's: configs, and names of parameters.

Configs are plain values here, ``config.json``'s and our table ``[model]``; parameters already have the same names on
both sides, up to prefixes and ties. Invariants: a config that our Llama cannot represent exactly is refused with the
key that says so, never approximated; ``llama_config_from_hf(hf_config(shape))`` names the same shape. Imports no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from closeranks.core.errors import CheckpointError, ModelError
from closeranks.facts.shapes.llama import LlamaShape, shape_problems

ARCHITECTURE, MODEL_TYPE = "LlamaForCausalLM", "llama"
_SIZES = {
    "hidden_size": "dim",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "intermediate_size": "ffn_dim",
    "vocab_size": "vocab_size",
}
_ROPE_SCALING = {
    "factor": "rope_factor",
    "low_freq_factor": "rope_low_freq_factor",
    "high_freq_factor": "rope_high_freq_factor",
    "original_max_position_embeddings": "rope_original_len",
}
_FORBIDDEN: dict[str, tuple[Callable[[Any], bool], str]] = {
    "attention_bias": (bool, "biases in attention"),
    "mlp_bias": (bool, "biases in the feed-forward layers"),
    "hidden_act": (lambda value: value != "silu", "an activation other than silu"),
    "sliding_window": (lambda value: value is not None, "attention over a sliding window"),
    "partial_rotary_factor": (lambda value: value not in (None, 1, 1.0), "rotary positions in a part of each head"),
    "quantization_config": (bool, "quantised weights"),
    "is_encoder_decoder": (bool, "an encoder"),
    "add_cross_attention": (bool, "cross-attention"),
}
"""Keys that our Llama does not support where the test of their value is true."""


def llama_config_from_hf(config: Mapping[str, Any], name: str = "config.json") -> dict[str, Any]:
    """The table ``[model]`` of a ``config.json``; ``name`` is what errors call it."""
    _refuse_foreign(config, name)
    shape = shape_of(config, name)
    return {"name": "llama", **asdict(shape)}


def max_len_of(config: Mapping[str, Any]) -> int:
    """The longest sequence that the config states; 2048 without one, which is transformers' default."""
    value = config.get("max_position_embeddings")
    return value if isinstance(value, int) and value > 0 else 2048


def shape_of(config: Mapping[str, Any], name: str) -> LlamaShape:
    sizes = {ours: _number(config, theirs, name) for theirs, ours in _SIZES.items()}
    kv_heads = config.get("num_key_value_heads")
    shape = LlamaShape(
        **sizes,
        num_kv_heads=sizes["num_heads"] if kv_heads is None else _number(config, "num_key_value_heads", name),
        norm_eps=_fraction(config.get("rms_norm_eps"), 1e-6, f"{name} says rms_norm_eps"),
        tied=bool(config.get("tie_word_embeddings", False)),
        **_rope(config, name),
    )
    if problems := shape_problems(shape):
        raise ModelError(f"{name} describes no model that can be built: {problems[0]}", "Fix the file.")
    head_dim = config.get("head_dim")
    if head_dim not in (None, shape.head_dim):
        what = f"{name} says head_dim = {head_dim}, but our Llama supports only hidden_size / num_attention_heads"
        raise ModelError(f"{what} = {shape.head_dim}", "Such a model cannot be loaded.")
    return shape


def _refuse_foreign(config: Mapping[str, Any], name: str) -> None:
    kind, architectures = config.get("model_type"), config.get("architectures") or [ARCHITECTURE]
    if kind != MODEL_TYPE:
        what = f"{name} says model_type = {kind!r}, but of Hugging Face's models closeranks loads only '{MODEL_TYPE}'"
        raise ModelError(what, "Name a Llama's folder, or build the model in a factory of your own.")
    if architectures not in ([ARCHITECTURE], ["LlamaModel"]):
        what = f"{name} says architectures = {architectures!r}, not ['{ARCHITECTURE}']"
        raise ModelError(what, "Name the folder of a causal language model.")
    for key, (is_foreign, meaning) in _FORBIDDEN.items():
        if key in config and is_foreign(config[key]):
            what = f"{name} says {key} = {config[key]!r}: {meaning}, which our Llama does not have"
            raise ModelError(what, "Such a model cannot be loaded.")


def _number(config: Mapping[str, Any], key: str, name: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        what = f"{name} does not say {key}" if value is None else f"{name} says {key} = {value!r}, which is not a size"
        raise ModelError(what, "Fix the file, or download it again.")
    return value


def _fraction(value: Any, default: float, what: str) -> float:
    """A number above 0; without one the default, which is transformers' own."""
    if value is None:
        return default
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise ModelError(f"{what} = {value!r}, which is not a number above 0", "Fix the file, or download it again.")
    return float(value)


def _rope(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The rotary settings: later versions of transformers keep all in ``rope_parameters``, earlier ones in two keys."""
    key = next((key for key in ("rope_parameters", "rope_scaling") if config.get(key)), "rope_scaling")
    table = config.get(key) or {}
    if not isinstance(table, Mapping):
        raise ModelError(f"{name} says {key} = {table!r}, which is not a table", "Fix the file, or download it again.")
    theta = table.get("rope_theta", config.get("rope_theta"))
    found: dict[str, Any] = {"rope_theta": _fraction(theta, 10_000.0, f"{name} says rope_theta")}
    kind = table.get("rope_type", table.get("type", "default"))
    if kind not in ("default", "llama3"):
        what = f"{name} says {key}.rope_type = {kind!r}, but our Llama supports only 'llama3' and 'default'"
        raise ModelError(what, "Such a model cannot be loaded.")
    if table.get("partial_rotary_factor", 1.0) not in (None, 1, 1.0):
        what = f"{name} says {key}.partial_rotary_factor = {table['partial_rotary_factor']!r}"
        raise ModelError(f"{what}, but our Llama rotates whole heads", "Such a model cannot be loaded.")
    if kind == "default":
        return {**found, "rope_factor": 1.0}
    for theirs, ours in _ROPE_SCALING.items():
        fallback = max_len_of(config) if theirs == "original_max_position_embeddings" else None
        if (value := table.get(theirs, fallback)) is None:
            raise ModelError(f"{name} does not say {key}.{theirs}", "Fix the file, or download it again.")
        found[ours] = _fraction(value, 0.0, f"{name} says {key}.{theirs}")
    return {**found, "rope_original_len": int(found["rope_original_len"])}


def hf_config(shape: LlamaShape, *, max_len: int, dtype: str) -> dict[str, Any]:
    """``config.json`` for a Llama of ours, in the keys that transformers 4 and 5 both read.

    No ids of special tokens: the weights do not say which ones a run's tokenizer has, and transformers' own defaults
    (1 and 2) would end a byte-level text at random.
    """
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURE],
        "model_type": MODEL_TYPE,
        **{theirs: getattr(shape, ours) for theirs, ours in _SIZES.items()},
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "max_position_embeddings": max_len,
        "tie_word_embeddings": shape.tied,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "torch_dtype": dtype,
    }
    if shape.rope_factor != 1.0:
        rope_scaling = {theirs: getattr(shape, ours) for theirs, ours in _ROPE_SCALING.items()}
        config["rope_scaling"] = {"rope_type": "llama3", **rope_scaling}
    return config


# Names


@dataclass(frozen=True, slots=True)
class NameMapping:
    """The mapping between their tensor names and ours."""

    names: Mapping[str, str]
    """Ours to theirs."""
    duplicates: Mapping[str, str] = field(default_factory=dict)
    """Ours to a second tensor of theirs, saved under another name of a tied parameter: it must hold the same values."""
    ignored: tuple[str, ...] = ()
    """Tensors of theirs that follow from the config and are not weights."""


Shapes = Mapping[str, tuple[int, ...]]


def match_names(wanted: Shapes, found: Shapes, ties: Mapping[str, str], place: str) -> NameMapping:
    """Find every wanted tensor among the found ones; where they do not match, one error describes both sets.

    ``ties``: other names of wanted tensors, each with the name under which it is wanted. ``place`` is what errors call
    the found ones.
    """
    ignored = tuple(name for name in found if name.endswith(".rotary_emb.inv_freq"))
    known = {name: shape for name, shape in found.items() if name not in ignored}
    called = _renamed(wanted.keys() | ties.keys(), known)
    names = {name: called[name] for name in wanted if name in called}
    duplicates: dict[str, str] = {}
    for alias, name in ties.items():
        if alias in called and names.setdefault(name, called[alias]) != called[alias]:
            duplicates[name] = called[alias]
    _refuse_unlike(wanted, names, set(known) - {*names.values(), *duplicates.values()}, place)
    for name, theirs in (*names.items(), *duplicates.items()):
        if tuple(found[theirs]) != tuple(wanted[name]):
            what = f"'{theirs}' has shape {tuple(found[theirs])} in {place} and {tuple(wanted[name])} in the model"
            raise CheckpointError(what, "Give the model the shape of the weights.")
    return NameMapping(names, duplicates, ignored)


def _renamed(wanted: Iterable[str], found: Iterable[str]) -> dict[str, str]:
    """Ours to theirs under the one prefix, added to or removed from theirs, that matches most of them.

    A base model is saved without ``model.``; a model that was part of a larger one has a prefix.
    """
    ours, theirs = set(wanted), list(found)
    options = [{name: name for name in theirs}]
    added, taken = _likeliest_prefix(ours, set(theirs)), _likeliest_prefix(theirs, ours)
    options += [{**{f"{added}{name}": name for name in theirs}, **options[0]}] if added else []
    options += [{name.removeprefix(taken): name for name in theirs if name.startswith(taken)}] if taken else []
    best = max(options, key=lambda option: len(option.keys() & ours))  # on a tie the first: unchanged names
    return {name: best[name] for name in best.keys() & ours}


def _likeliest_prefix(longer: Iterable[str], shorter: Collection[str]) -> str:
    """The prefix with which most of the longer names extend one of the shorter; empty where none does."""
    found: Counter[str] = Counter()
    for name in longer:
        parts = name.split(".")
        ends = (".".join(parts[first:]) for first in range(1, len(parts)))
        found.update(name.removesuffix(end) for end in ends if end in shorter)
    return max(found, key=lambda prefix: (found[prefix], prefix), default="")


def _refuse_unlike(wanted: Shapes, names: Mapping[str, str], odd: Iterable[str], place: str) -> None:
    missing, odd = [name for name in wanted if name not in names], sorted(odd)
    if missing == ["lm_head.weight"] and not odd:
        what = f"{place} has no output projection of its own ('lm_head.weight')"
        raise CheckpointError(what, "Set model.tied = true, as the weights have it.")
    if missing:
        count = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        have = f"; it has '{odd[0]}', which the model does not have" if odd else ""
        what = f"{place} has no '{missing[0]}'{count} of the model's {len(wanted)} tensors{have}"
        raise CheckpointError(what, "Name weights of this model, or change [model] to theirs.")
    if odd:
        count = f" and {len(odd) - 1} more" if len(odd) > 1 else ""
        what = f"{place} has '{odd[0]}'{count}, which the model does not have"
        raise CheckpointError(what, "Name weights of this model, or change [model] to theirs.")
